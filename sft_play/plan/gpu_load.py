"""The load of GPUs as NVML gives it. Imports no torch."""

from collections.abc import Mapping

from sft_play.plan.devices import GIB, answer, nvml_session
from sft_play.runs.metrics import GpuSample


def sample_gpus(uuid_of_rank: Mapping[int, str]) -> list[GpuSample]:
    """Return the load of each rank's GPU now.

    Raises: NvmlUnavailable.
    """
    samples = []
    with nvml_session() as nvml:
        for rank, uuid in uuid_of_rank.items():
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            rates = answer(nvml, "nvmlDeviceGetUtilizationRates", handle)
            memory = answer(nvml, "nvmlDeviceGetMemoryInfo", handle)
            milliwatts = answer(nvml, "nvmlDeviceGetPowerUsage", handle)
            celsius = answer(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
            sample = GpuSample(
                rank=rank,
                busy_percent=rates and rates.gpu,
                used_gib=memory and round((memory.total - memory.free) / GIB, 2),
                watts=None if milliwatts is None else round(milliwatts / 1000),
                celsius=celsius,
            )
            samples.append(sample)
    return samples
