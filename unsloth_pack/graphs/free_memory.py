"""How much GPU memory is free."""

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + reserved, allowed) - allocated
