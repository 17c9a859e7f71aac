"""A CUDA card as a check sees it: what is free on it, what tensors hold, and a ballast that makes it as small as a check wants it."""

import ctypes

import torch

RESERVED_BY_GRAPHS = 2  # CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT


class Card:
    def __init__(self, management):
        self.management = management
        self.device = management.get_torch_device()
        self._ballast = None

    @property
    def asynchronous(self):
        """ComfyUI asks torch for the driver's own allocator, unless it is started with --disable-cuda-malloc."""
        return torch.cuda.get_allocator_backend() == "cudaMallocAsync"

    def free(self):
        """Bytes free as the driver says it."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def free_for_comfyui(self):
        """Bytes free as ComfyUI counts them: with those that torch keeps without need."""
        torch.cuda.synchronize(self.device)
        return int(self.management.get_free_memory(self.device))

    def held(self):
        """Bytes of all tensors of this process. The driver's allocator does not count what was asked for, only what it gave."""
        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        ballast = 0 if self._ballast is None else self._ballast.nbytes
        return stats["allocated_bytes.all.current" if self.asynchronous else "requested_bytes.all.current"] - ballast

    def held_by_graphs(self):
        """Bytes that the driver keeps for memory of captured graphs; torch's figures do not show them."""
        value, driver = ctypes.c_uint64(), ctypes.CDLL("libcuda.so.1")
        result = driver.cuDeviceGetGraphMemAttribute(ctypes.c_int(self.device.index or 0), RESERVED_BY_GRAPHS, ctypes.byref(value))
        return value.value if result == 0 else None

    def trim(self):
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def shrink_to(self, free):
        """Leave that many bytes free. Raises where the card has no more than that."""
        self.grow_back()
        self.trim()
        surplus = self.free() - int(free)
        if surplus < 0:
            raise RuntimeError(f"this check wants {free / 1e9:.1f} GB free on {self.device}, {self.free() / 1e9:.1f} GB are")
        self._ballast = torch.empty(surplus, dtype=torch.uint8, device=self.device)

    def grow_back(self):
        self._ballast = None
        self.trim()

    def allocate(self, nbytes):
        """A tensor of that size, for as long as it is held."""
        return torch.empty(int(nbytes), dtype=torch.uint8, device=self.device)
