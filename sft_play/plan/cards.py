"""GPU models: memory, FLOPS, bandwidth and links, and parsing hardware from their names."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.errors import ConfigError
from sft_play.plan.devices import BF16_CAPABILITY, GIB, Gpu, Hardware, cpu_count

# FLOPS, measured: large bfloat16 matrices in torch 2.11, at the power limit
MEASURED_FLOPS = {"NVIDIA H200": 790e12}
MORE_RAM = 16 * GIB  # host RAM in addition to the GPUs' memory
HOST_LINK_SHARE = 54.9 / 63  # of the lanes' rate: measured on an H100
REACHED_SHARE = 790 / 989  # of the data sheet's FLOPS, if nothing was measured


@dataclass(frozen=True)
class Card:
    """One GPU model.

    `flops` are dense operations per second in bfloat16, or in float16 if the card has no bfloat16,
    with float32 sums and without sparsity.
    """

    name: str  # as NVML spells it
    gib: float  # usable memory
    capability: tuple[int, int]
    flops: float
    bandwidth: float  # of the GPU's memory, bytes per second
    link: Literal["NVLink", "PCIe"]
    link_bytes: float  # from one GPU to its neighbor, in one direction, bytes per second
    is_unified: bool = False  # its memory is also the host's

    @property
    def host_link_bytes(self) -> float:
        """Bytes per second from pinned host memory to the GPU, over 16 lanes of PCIe 3, 4 or 5."""
        lanes = 63e9 if self.capability >= (9, 0) else 32e9 if self.capability >= (8, 0) else 16e9
        return HOST_LINK_SHARE * lanes

    @property
    def reached_flops(self) -> float:
        """Operations per second that GEMMs of large matrices reach.

        Measured on an H200; other cards are assumed to reach the same share of their data sheet.
        """
        return MEASURED_FLOPS.get(self.name, REACHED_SHARE * self.flops)


# Memory in GiB as CUDA reports it ("GPU 0 has a total capacity of 139.72 GiB"), the lowest of
# several published torch logs: drivers differ by up to 0.2 GiB. All are below the advertised size,
# because the driver keeps some and makers count in GB. No log named an H20 or a 4070: they have the
# share of the advertised size that the A100 and the 3060 have. The rest is from NVIDIA's data
# sheets, halved if they count sparsity or both directions; for GeForce and RTX, from the white
# papers of their architectures (GA102, AD102, RTX Blackwell, TU102), for the 3060 and the 4070 from
# two tensor operations for each float32 one, for GB10 an eighth of its sparse FP4. x16 slots of
# PCIe 3, 4 and 5 carry 16, 32 and 63 GB/s. NVLink bridges, which some PCIe cards can be given, are
# not counted.
CARDS: dict[str, Card] = {
    "GB200": Card("NVIDIA GB200", 184.31, (10, 0), 2500e12, 8000e9, "NVLink", 900e9),
    "B300": Card("NVIDIA B300 SXM6 AC", 267.69, (10, 3), 2250e12, 8000e9, "NVLink", 900e9),
    "B200": Card("NVIDIA B200", 178.35, (10, 0), 2250e12, 8000e9, "NVLink", 900e9),
    "H200": Card("NVIDIA H200", 139.72, (9, 0), 989e12, 4800e9, "NVLink", 450e9),
    "GH200": Card("NVIDIA GH200 480GB", 94.50, (9, 0), 989e12, 4000e9, "NVLink", 450e9),
    "H20": Card("NVIDIA H20", 94.90, (9, 0), 148e12, 4000e9, "NVLink", 450e9),
    "H100": Card("NVIDIA H100 80GB HBM3", 79.10, (9, 0), 989e12, 3350e9, "NVLink", 450e9),
    "A100-80": Card("NVIDIA A100-SXM4-80GB", 79.14, (8, 0), 312e12, 2039e9, "NVLink", 300e9),
    "A100-40": Card("NVIDIA A100-SXM4-40GB", 39.38, (8, 0), 312e12, 1555e9, "NVLink", 300e9),
    "PRO-6000": Card(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        *(94.96, (12, 0), 503.8e12, 1792e9, "PCIe", 63e9),
    ),
    "PRO-6000-SERVER": Card(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        *(94.96, (12, 0), 503.8e12, 1597e9, "PCIe", 63e9),
    ),
    "GB10": Card("NVIDIA GB10", 119.18, (12, 1), 125e12, 273e9, "PCIe", 32e9, True),
    "L40S": Card("NVIDIA L40S", 44.39, (8, 9), 362e12, 864e9, "PCIe", 32e9),
    "L4": Card("NVIDIA L4", 22.16, (8, 9), 121e12, 300e9, "PCIe", 32e9),
    "A10G": Card("NVIDIA A10G", 21.98, (8, 6), 70e12, 600e9, "PCIe", 32e9),
    "A6000": Card("NVIDIA RTX A6000", 47.53, (8, 6), 154.8e12, 768e9, "PCIe", 32e9),
    "6000-ADA": Card(
        "NVIDIA RTX 6000 Ada Generation", 47.48, (8, 9), 364.2e12, 960e9, "PCIe", 32e9
    ),
    "5090": Card("NVIDIA GeForce RTX 5090", 31.36, (12, 0), 209.5e12, 1792e9, "PCIe", 63e9),
    "5080": Card("NVIDIA GeForce RTX 5080", 15.45, (12, 0), 112.6e12, 960e9, "PCIe", 63e9),
    "5070-TI": Card("NVIDIA GeForce RTX 5070 Ti", 15.45, (12, 0), 87.9e12, 896e9, "PCIe", 63e9),
    "4090": Card("NVIDIA GeForce RTX 4090", 23.64, (8, 9), 165.2e12, 1008e9, "PCIe", 32e9),
    "4080": Card("NVIDIA GeForce RTX 4080", 15.67, (8, 9), 97.5e12, 717e9, "PCIe", 32e9),
    "4070": Card("NVIDIA GeForce RTX 4070", 11.65, (8, 9), 58.3e12, 504e9, "PCIe", 32e9),
    "3090": Card("NVIDIA GeForce RTX 3090", 23.67, (8, 6), 71e12, 936e9, "PCIe", 32e9),
    "3060": Card("NVIDIA GeForce RTX 3060", 11.65, (8, 6), 25.5e12, 360e9, "PCIe", 32e9),
    "2080-TI": Card("NVIDIA GeForce RTX 2080 Ti", 10.76, (7, 5), 53.8e12, 616e9, "PCIe", 16e9),
    "T4": Card("Tesla T4", 14.56, (7, 5), 65e12, 320e9, "PCIe", 16e9),
    "V100-32": Card("Tesla V100-SXM2-32GB", 31.74, (7, 0), 125e12, 900e9, "NVLink", 150e9),
    "V100-16": Card("Tesla V100-SXM2-16GB", 15.75, (7, 0), 125e12, 900e9, "NVLink", 150e9),
}


ALSO_NAMED = {"DGX-SPARK": "GB10"}
# Other makers' GPUs by the beginning of their names, with what trains on them
OTHERS = {
    r"AMD|INSTINCT|RADEON|STRIX|MI-?[0-9]{2}|RX-?[0-9]|W[679][0-9]00|[79][0-9]{3}-?X": (
        "AMD GPUs",
        "Axolotl and TRL train on ROCm",
    ),
    r"APPLE|MPS|M[1-9](?![0-9])": ("Apple GPUs", "mlx-lm trains on them"),
    r"INTEL|ARC|GAUDI|HPU|MAX-1[15]|[AB][357][578]0(?![0-9])": (
        "Intel GPUs",
        "TRL trains on Arc, optimum-habana on Gaudi",
    ),
}


def key_of(device_name: str) -> str | None:
    """Return the key in CARDS of a device by NVML's name.

    None for any other device, e.g. a laptop's GPU or a part of a card.

    >>> key_of("NVIDIA H200"), key_of("NVIDIA H200 MIG 1g.18gb")
    ('H200', None)
    """
    for key, card in CARDS.items():
        if card.name == device_name:
            return key
    return None


def card_of(gpu_names: Sequence[str]) -> Card | None:
    """Return what is known of GPUs; None unless they are of one model that is in CARDS."""
    if len(set(gpu_names)) != 1:
        return None
    key = key_of(gpu_names[0])
    return CARDS[key] if key else None


def parse_hardware(words: str) -> Hardware:
    """Return the hardware that `2xH200`, `8xA100-80`, `H100:8`, `RTX 4090` or `2x24GiB` names.

    All memory of its GPUs is free. Its host is assumed to have as much free RAM as its GPUs have
    memory, plus 16 GiB, but none if it shares the GPU's memory. The cores are those of this host.
    A size in GiB means a GPU with that much usable memory and capability 8.0.

    Raises: ConfigError for other words, with the nearest name.
    """
    if re.search("[+,&]", words):
        hint = "a plan is for GPUs of one kind: count them all as the smallest, such as 3x4090"
        raise ConfigError(f"GPUS={words}: {hint}")
    name = words.strip()  # `2x4090`, `4090x2`, `H100:4`, `RTX 4090`
    readings = []
    if match := re.fullmatch(r"([0-9]{1,4})\s*[xX]\s*(\S.*)", name):
        readings.append((int(match[1]), match[2]))
    if match := re.fullmatch(r"(.*\S)\s*[xX:]\s*([0-9]{1,4})", name):
        readings.append((int(match[2]), match[1]))
    readings.append((1, name))
    count, gpu = next(((count, gpu) for count, word in readings if (gpu := _gpu(word))), (0, None))
    if gpu is None:
        _refuse_others(words, readings)
        count, word = readings[0]
        raise ConfigError(f"GPUS={words}: no GPU of that name; {_card_hint(max(count, 1), word)}")
    if count < 1:
        raise ConfigError(f"GPUS={words}: write how many of which GPU, such as GPUS=2xH200")
    gpus = tuple(replace(gpu, index=index) for index in range(count))
    card = card_of([gpu.name])
    is_unified = card is not None and card.is_unified
    ram_bytes = 0 if is_unified else count * gpu.total_bytes + MORE_RAM
    return Hardware("cuda", gpus, cpu_count(), ram_bytes)


def _refuse_others(words: str, readings: Sequence[tuple[int, str]]) -> None:
    """Raise ConfigError for a GPU of a maker whose GPUs are not supported."""
    keys = [_card_key(word) for _, word in readings]
    for names, (gpus, instead) in OTHERS.items():
        if any(re.match(names, key) for key in keys):
            raise ConfigError(
                f"GPUS={words}: {gpus} are not supported. {instead}. For SFT-Play, rent an NVIDIA "
                "GPU, such as GPUS=1xH100; `make train DEVICE=cpu` trains small models anywhere"
            )


def _gpu(word: str) -> Gpu | None:
    """Return the GPU of a name or a size, None for another word."""
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)GiB", word, re.IGNORECASE)
    if size and float(size[1]) > 0:
        total_bytes = int(float(size[1]) * GIB)
        return Gpu(0, f"GPU of {size[1]} GiB", total_bytes, total_bytes, BF16_CAPABILITY)
    card = CARDS.get(key_of(word) or _card_key(word))
    if card is None:
        return None
    total_bytes = int(card.gib * GIB)
    return Gpu(0, card.name, total_bytes, total_bytes, card.capability)


def _card_key(word: str) -> str:
    """Return a card's name as CARDS spells it: `RTX 4090` is 4090, `RTX 6000 Ada` is 6000-ADA."""
    name = re.sub(r"[\s_]+", "-", word.upper())
    name = re.sub(r"^(?:NVIDIA|GEFORCE|TESLA|RTX|-)+", "", name).removesuffix("GB")
    name = re.sub(r"-BLACKWELL|-WORKSTATION|-EDITION", "", name)
    name = re.sub(r"(?<=[0-9])TI$", "-TI", name)
    return ALSO_NAMED.get(name, name)


def _card_hint(count: int, word: str) -> str:
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:G|GB)", word, re.IGNORECASE)
    if size and float(size[1]) > 0:
        return f"did you mean {count}x{size[1]}GiB?"
    key = _card_key(word)
    near = [name for name in CARDS if name.startswith(f"{key}-")]
    near = near or difflib.get_close_matches(key, CARDS, n=1, cutoff=0.7)
    if near:
        return f"did you mean {' or '.join(f'{count}x{name}' for name in near)}?"
    return f"known are {', '.join(CARDS)}; any other goes by its memory, such as {count}x24GiB"
