"""Compare the FLOPs of a run with the peak of its chips."""

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import TrainingArguments

from unsloth_pack.lora.quantised import Fp8Linear

# Dense TFLOP/s in 16 bits with sums in float32, and in fp8 (None without it), from the data sheets and
# architecture white papers of NVIDIA and AMD. The first name that stands in a device's name decides.
_PEAKS: dict[str, tuple[float, float | None]] = {
    "GB200": (2500, 5000), "B200": (2250, 4500), "H200 NVL": (835.5, 1671), "H100 NVL": (835.5, 1671),
    "H100 PCIe": (756.5, 1513), "GH200": (989.5, 1979), "H200": (989.5, 1979), "H100": (989.5, 1979),
    "H800": (989.5, 1979), "H20": (148, 296), "A100": (312, None), "A800": (312, None), "A40": (149.7, None),
    "A30": (165, None), "A10": (125, None), "L40S": (362.05, 733), "L40": (181.05, 362), "L4": (121, 242.5),
    "T4": (65, None), "V100-PCIE": (112, None), "V100": (125, None), "RTX 6000 Ada": (364.25, 728.5),
    "RTX A6000": (154.85, None), "RTX 5090": (209.5, 419), "RTX 4090": (165.2, 330.3),
    "RTX 3090": (71, None), "MI300X": (1307.4, 2614.9), "MI325X": (1307.4, 2614.9),
}  # fmt: skip
# Names of `unsloth-pack estimate`: the device's, and GiB as torch reports them
GPUS: dict[str, tuple[str, float]] = {
    "b200": ("B200", 178.3), "h200": ("H200", 139.8), "h100": ("H100", 79.1), "a100": ("A100", 79.2),
    "a100-40": ("A100", 39.4), "l40s": ("L40S", 44.4), "a10": ("A10", 22.0), "l4": ("L4", 22.0),
    "t4": ("T4", 14.6), "5090": ("RTX 5090", 31.4), "4090": ("RTX 4090", 23.5), "3090": ("RTX 3090", 23.6),
}  # fmt: skip
_OTHER_CHIP = re.compile(r"Laptop|Max-Q|\bTi\b|MIG| D$")  # another of that name, or a part of one


def peak_flops(device_name: str, in_fp8: bool = False) -> float | None:
    """Return the dense peak of a chip in FLOP/s, of 16-bit or of fp8 products; None if it is not known."""
    if _OTHER_CHIP.search(device_name):
        return None
    peaks = (peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    peak = next(peaks, (None, None))[in_fp8]
    return None if peak is None else peak * 1e12


@dataclass(frozen=True)
class Gpu:
    """A GPU by its name, with its memory in bytes and the peak of its 16-bit products in FLOP/s, or None."""

    name: str
    memory: int
    peak: float | None

    @classmethod
    def here(cls) -> "Gpu | None":
        """Return the GPU of this process, or None."""
        if not torch.cuda.is_available():
            return None
        name, device = torch.cuda.get_device_name(), torch.cuda.current_device()
        return cls(name, torch.cuda.get_device_properties(device).total_memory, peak_flops(name))

    @classmethod
    def named(cls, name: str) -> "Gpu":
        """Return a GPU of `GPUS`."""
        device_name, gib = GPUS[name]
        return cls(device_name, int(gib * 2**30), peak_flops(device_name))


@dataclass(frozen=True)
class Chips:
    """The devices of a run: their number, and the peak of one in FLOP/s, or None."""

    number: int
    peak: float | None

    @classmethod
    def from_args(cls, args: TrainingArguments, model: nn.Module) -> "Chips":
        """Return the chips that train a model. For float32 there is no peak: tensor cores are a setting."""
        peak = None
        if args.device.type == "cuda" and (args.bf16 or args.fp16):
            in_fp8 = any(isinstance(module, Fp8Linear) for module in model.modules())
            peak = peak_flops(torch.cuda.get_device_name(args.device), in_fp8)
        return cls(args.world_size, peak)

    def utilisation(self, model_flops: float, hardware_flops: float, seconds: float) -> dict[str, float]:
        """Return `tflops`, model TFLOP/s a device; with a peak also `mfu` and `hfu`, 0 to 1.

        Args:
            model_flops, hardware_flops: of all devices; the latter 0, and no `hfu`, where they are not known.
        """
        if seconds <= 0:
            return {}
        rates = {"mfu": model_flops / seconds / self.number, "hfu": hardware_flops / seconds / self.number}
        tflops = {"tflops": rates["mfu"] / 1e12}
        if self.peak is None:
            return tflops
        return tflops | {name: rate / self.peak for name, rate in rates.items() if rate}
