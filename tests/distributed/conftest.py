"""One Ray cluster of this machine for the tests that use the fixture `cluster`."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns about a future default
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_NUM_REDIS_GET_RETRIES": "200",  # seconds in which Ray must start; 20 is too few on a busy machine
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_worker_niceness": "0",  # by default workers give way to all other processes
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{_FOLDER}:{_FOLDER.parent / 'support'}",  # workers import the functions and classes of the tests
}


def _start(num_cpus: int, folder: Path, attempts: int = 3) -> None:
    """Start Ray; it gives up after 30 seconds, which a busy machine can exceed."""
    import ray

    try:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            _temp_dir=str(folder),
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=1 << 28,
        )
    except Exception:
        ray.shutdown()
        if attempts == 1:
            raise
        _start(num_cpus, folder, attempts - 1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start Ray with 8 logical processors, and stop it at the end."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the paths of its sockets must be short
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own start: files that it does not close
        import ray

        _start(8, folder)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
