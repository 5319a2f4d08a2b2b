"""torch_npu's allocator over addresses that it reserves: memory grows in place, goes back, and has an end."""

import torch
import torch_npu  # noqa: F401

torch.npu.set_device(0)
parts = [torch.full((3_000_000,), float(i), device="npu") for i in range(6)]
total = torch.cat(parts).sum().item()
held = torch.npu.memory_reserved() >> 20
del parts
torch.npu.synchronize()
torch.npu.empty_cache()
free, size = torch.npu.mem_get_info()
print(f"total {total:.0f} held {held} MiB back {free == size}")
