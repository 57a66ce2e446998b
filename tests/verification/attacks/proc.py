"""Programs that read or write /proc, /sys, /dev and the environment."""

from attacks.attack import program, read_attacks


def _open(names: str, flags: str) -> str:
    """Return the source of a program that opens files and does nothing with them."""
    return f"""
import os
for path in {names}:
    try:
        os.close(os.open(path, os.{flags}))
    except OSError:
        continue
    print(BREACH, path)
"""


ATTACKS = (
    *read_attacks("proc"),
    program(
        "settings of the kernel",
        _open(
            "('/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', "
            "'/proc/sys/vm/overcommit_memory', '/proc/sys/kernel/yama/ptrace_scope', '/proc/sysrq-trigger')",
            "O_WRONLY",
        ),
    ),
    program("identity maps", _open("('/proc/self/uid_map', '/proc/self/gid_map', '/proc/self/setgroups')", "O_WRONLY")),
    program(
        "system files",
        _open(
            "('/sys/fs/cgroup/cgroup.procs', '/sys/kernel/mm/transparent_hugepage/enabled', "
            "'/sys/power/state', '/sys/kernel/uevent_helper')",
            "O_WRONLY",
        ),
    ),
    program(
        "kernel log",
        _open("('/dev/kmsg', '/proc/kmsg', '/proc/kallsyms', '/proc/kcore', '/proc/config.gz')", "O_RDONLY"),
    ),
    program("memory devices", _open("('/dev/mem', '/dev/kmem', '/dev/port')", "O_RDONLY")),
    program("terminals", _open("('/dev/tty', '/dev/ptmx', '/dev/console', '/dev/tty0', '/dev/pts/0')", "O_RDWR")),
    program(
        "disks",
        _open("('/dev/sda', '/dev/vda', '/dev/nvme0n1', '/dev/loop0', '/dev/loop-control', '/dev/dm-0')", "O_RDONLY"),
    ),
    program(
        "special devices",
        _open(
            "('/dev/fuse', '/dev/kvm', '/dev/net/tun', '/dev/userfaultfd', '/dev/uinput', "
            "'/dev/vhost-net', '/dev/vsock', '/dev/hwrng')",
            "O_RDWR",
        ),
    ),
    program(
        "accelerators",
        _open("('/dev/nvidia0', '/dev/nvidiactl', '/dev/nvidia-uvm', '/dev/dri/card0', '/dev/kfd')", "O_RDWR"),
    ),
    program(
        "information on the machine",
        _open(
            "('/proc/version', '/proc/cpuinfo', '/proc/mounts', '/proc/net/tcp', "
            "'/proc/self/mountinfo', '/proc/1/cmdline', '/proc/self/status')",
            "O_RDONLY",
        ),
    ),
)
