// A CUDA device in the memory of the host, for a build of PyTorch without CUDA; see simulated_device.py.
//
// Every operator with a tensor of the device reaches `run_on_cpu`. It checks what a GPU would refuse, counts the call, and lets
// the CPU compute. Shapes, strides and storages are those of real tensors, so views cost nothing, as on a GPU.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr int kMaxDevices = 8;
constexpr const char* kTwoDevices = "Expected all tensors to be on the same device, but ";

thread_local DeviceIndex current = 0;
thread_local int inside = 0;  // > 0 while the CPU computes: its own copies are not those of a GPU
DeviceIndex num_devices = 1;
int64_t capacity = 0, in_use[kMaxDevices], peak[kMaxDevices];
std::map<std::string, int64_t> counted;
std::set<void*> pinned;
std::mutex lock;

void count(const std::string& what) {
  std::lock_guard<std::mutex> guard(lock);
  counted[what]++;
}

DeviceIndex checked(DeviceIndex index) {
  TORCH_CHECK(index < num_devices, "invalid device ordinal");
  return index < 0 ? current : index;
}

bool on_device(Device device) { return device.type() == kDevice; }

// ---- memory ----

struct Block {
  size_t size;
  DeviceIndex device;
  void* data;
};

void* aligned(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(!posix_memalign(&data, 64, size ? size : 64), "the host has no memory left");
  return data;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> guard(lock);
  in_use[block->device] -= block->size;
  free(block->data);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> guard(lock);
    bool fits = in_use[current] + (int64_t)size <= capacity;
    TORCH_CHECK_WITH(OutOfMemoryError, fits, "CUDA out of memory. Tried to allocate ", size, " bytes");
    auto* block = new Block{size, current, aligned(size)};
    memset(block->data, 0x7f, size);  // as on a GPU, new memory is not zero
    in_use[current] += size;
    peak[current] = std::max(peak[current], in_use[current]);
    return {block->data, block, &free_block, Device(kDevice, current)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} device_allocator;

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(data);
  free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = aligned(size);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(data);
    return {data, data, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} pinned_allocator;

// ---- devices, streams and generators ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device d) const override {
    Device before(kDevice, current);
    current = checked(d.index());
    return before;
  }
  Device getDevice() const override { return Device(kDevice, current); }
  void setDevice(Device d) const override { current = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index() < 0 ? current : d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, Device(kDevice, checked(d.index()))); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream getNewStream(Device d, int = 0) const override { return getStream(d); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const override { return getStream(s.device()); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { count("wait:synchronize"); }
  void synchronizeEvent(void*) const override { count("wait:synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { count("wait:synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) { device_ = Device(kDevice, index); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return current; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(DeviceIndex) const override { count("wait:synchronize"); }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = checked(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = current;
    current = checked(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(const_cast<void*>(data)) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, current); }
  const at::Generator& getDefaultGenerator(DeviceIndex index = -1) const override {
    static at::Generator generators[kMaxDevices];
    auto& generator = generators[checked(index)];
    if (!generator.defined()) generator = getNewGenerator(index);
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex index = -1) const override {
    return at::make_generator<Generator>(checked(index));
  }
};

// ---- tensors: memory, views and copies ----

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
using OptionalDevice = std::optional<Device>;
using OptionalType = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using Sizes = at::IntArrayRef;

Device place(OptionalDevice device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return Device(kDevice, checked(device ? device->index() : -1));
}

at::Tensor empty(Sizes size, OptionalType type, OptionalLayout, OptionalDevice device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(place(device, pin));
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, OptionalType type, OptionalLayout, OptionalDevice device, std::optional<bool> pin) {
  c10::DeviceGuard guard(place(device, pin));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(type));
}

// The same memory, as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& t) {
  if (!on_device(t.device())) return t;
  auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  int64_t numbers = t.storage().nbytes() / t.element_size();
  auto flat = at::from_blob(storage->_mutable_data_ptr_no_checks().get(), {numbers}, at::TensorOptions().dtype(t.dtype()));
  auto view = at::native::as_strided_tensorimpl(flat, t.sizes(), t.strides(), t.storage_offset());
  return t.is_conj() ? view.conj() : view;
}

void count_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (inside) return;
  if (to.device() == from.device()) return count("kernel:aten::copy_");
  if (on_device(to.device()) && on_device(from.device())) return count("copy:between_devices");
  const char* direction = on_device(to.device()) ? "to_device" : "to_host";
  bool waits = !non_blocking || !(on_device(to.device()) ? from : to).is_pinned();
  count(std::string(waits ? "wait:" : "copy:") + direction);
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  count_copy(to, from, non_blocking);
  c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::Tensor(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor as_strided(const at::Tensor& t, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, Sizes size) { return at::native::view(t, size); }
at::Tensor reshape_alias(const at::Tensor& t, Sizes size, Sizes stride) { return at::native::_reshape_alias(t, size, stride); }
at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); }
at::Tensor& set_to(at::Tensor& t, at::Storage storage, int64_t offset, Sizes size, Sizes stride) {
  return at::native::set_storage_cpu_(t, storage, offset, size, stride);
}
at::Tensor& set_to_storage(at::Tensor& t, at::Storage storage) {
  return set_to(t, storage, 0, {(int64_t)(storage.nbytes() / t.element_size())}, {1});
}
at::Tensor& set_to_tensor(at::Tensor& t, const at::Tensor& other) {
  return set_to(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

const at::Tensor& resize(const at::Tensor& t, Sizes size, std::optional<at::MemoryFormat>) {
  auto* tensor = t.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  size_t needed = (tensor->numel() + tensor->storage_offset()) * t.element_size();
  auto& storage = const_cast<at::Storage&>(tensor->unsafe_storage());
  if (needed > storage.nbytes()) {
    c10::DeviceGuard guard(t.device());
    auto data = device_allocator.allocate(needed);
    memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(needed);
  }
  return t;
}

at::Scalar item(const at::Tensor& t) {
  if (!inside) count("wait:item");
  return at::_local_scalar_dense(on_cpu(t));
}

// ---- all other operators ----

// Operators that do not take a CPU tensor of zero dimensions; element-wise ones do.
const std::set<std::string> kNoScalars = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::index_select", "aten::gather", "aten::scatter",
    "aten::scatter_", "aten::embedding", "aten::cat", "aten::stack", "aten::index_copy", "aten::index_copy_",
    "aten::index_add", "aten::index_add_", "aten::searchsorted", "aten::sort", "aten::cumsum", "aten::_softmax"};
// Operators whose result has a size that the host must know.
const std::set<std::string> kWaits = {
    "aten::nonzero", "aten::bincount", "aten::repeat_interleave", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::masked_select"};

using See = std::function<void(const at::Tensor&, const std::string&)>;

void each_tensor(const c10::OperatorHandle& op, torch::jit::Stack* stack, const See& see) {
  const auto& arguments = op.schema().arguments();
  auto value = stack->end() - arguments.size();
  for (const auto& argument : arguments) {
    const auto& v = *value++;
    if (v.isTensor()) {
      see(v.toTensor(), argument.name());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector()) see(t, argument.name());
    } else if (v.isList()) {
      for (const c10::IValue& item : v.toListRef())
        if (item.isTensor()) see(item.toTensor(), argument.name());
    }
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  bool indexes = name == "aten::index" || name == "aten::_unsafe_index" || name.find("index_put") != std::string::npos;
  bool waits = kWaits.count(name) > 0;
  Device device(c10::DeviceType::CPU);
  each_tensor(op, stack, [&](const at::Tensor& t, const std::string& argument) {
    if (!t.defined() || !on_device(t.device())) return;
    TORCH_CHECK(device.is_cpu() || device == t.device(), kTwoDevices, name, " got ", device, " and ", t.device(), " (", argument, ")");
    device = t.device();
  });
  each_tensor(op, stack, [&](const at::Tensor& t, const std::string& argument) {
    if (!t.defined()) return;
    if (indexes && argument == "indices") {  // a GPU copies an index, and finds the places of a mask
      waits = waits || t.device().is_cpu() || t.scalar_type() == at::kBool;
    } else if (on_device(device) && t.device().is_cpu()) {
      TORCH_CHECK(t.dim() == 0 && !kNoScalars.count(name), kTwoDevices, name, " got ", device, " and cpu (", argument, ", shape ", t.sizes(), ")");
    }
  });
  const auto arguments = op.schema().arguments().size();
  for (auto value = stack->end() - arguments; value != stack->end(); ++value) {
    if (!value->isGenerator()) continue;
    TORCH_CHECK(!on_device(device) || on_device(value->toGenerator().device()), "Expected a device type '", device.type(), "' for generator but found 'cpu'");
    *value = c10::IValue();  // the CPU's default generator
  }
  count((waits ? "wait:" : "kernel:") + name);
  c10::DeviceGuard guard(on_device(device) ? device : Device(kDevice, current));
  struct Inside {
    Inside() { inside++; }
    ~Inside() { inside--; }
  } now;
  at::native::cpu_fallback(op, stack);
}

// ---- for Python ----

void setup(int64_t devices, int64_t memory) {
  TORCH_CHECK(devices <= kMaxDevices, "at most ", kMaxDevices, " devices, got ", devices);
  num_devices = devices;
  capacity = memory;
  c10::SetAllocator(kDevice, &device_allocator);
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();  // in place of the empty ones
}

void reset() {
  std::lock_guard<std::mutex> guard(lock);
  counted.clear();
}

std::vector<std::string> counts() {
  std::lock_guard<std::mutex> guard(lock);
  std::vector<std::string> entries;
  for (const auto& [what, times] : counted) entries.push_back(what + "=" + std::to_string(times));
  return entries;
}

std::vector<int64_t> memory(int64_t index) { return {in_use[checked(index)], peak[checked(index)], capacity}; }

void reset_peak(int64_t index) {
  std::lock_guard<std::mutex> guard(lock);
  peak[checked(index)] = in_use[checked(index)];
}

int64_t exchange_device(int64_t index) {
  auto before = current;
  current = checked(index);
  return before;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_to);
  m.impl("set_.source_Storage", &set_to_storage);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &item);
  // PyTorch would choose kernels of a GPU below these two.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY(simulated_device, m) {
  m.def("setup(int devices, int memory) -> ()", &setup);
  m.def("reset() -> ()", &reset);
  m.def("counts() -> str[]", &counts);
  m.def("memory(int device) -> int[]", &memory);
  m.def("reset_peak(int device) -> ()", &reset_peak);
  m.def("exchange_device(int device) -> int", &exchange_device);
}

}  // namespace
