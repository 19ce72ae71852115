"""Time of what one GPU computes."""

from __future__ import annotations

from cuboid.planner.description.cluster import Gpu

#: Matrix products of flash attention's backward for each of its forward: five instead of two.
ATTENTION_BACKWARD = 2.5
_ELEMENT_BYTES = 2


class Kernels:
    """Times of kernels on one kind of GPU.

    Args:
        gpu: which.
        products_speed: of products with weights, for that in 16 bits.
    """

    def __init__(self, gpu: Gpu, products_speed: float = 1.0) -> None:
        #: Operations a second of large products.
        self.product_flops = gpu.peak_flops * gpu.matmul_efficiency * products_speed
        self._attention_flops = gpu.peak_flops * gpu.attention_efficiency
        self._sheet_bytes = gpu.memory_bytes_per_s
        self._bytes = gpu.memory_bytes_per_s * gpu.memory_efficiency
        self.kernel_s = gpu.kernel_s

    def matmul_s(self, rows: float, outputs: float, inputs: float, count: int = 1, *, grouped: bool = False) -> float:
        """``count`` products of ``[rows, inputs]`` and ``[inputs, outputs]``, each a kernel or grouped in one.

        The bytes are added to the operations, for the two only overlap in part. That makes small products slow: with I
        inputs the bytes of the result alone take peak/(memory's rate · I) of the time of the operations.
        """
        moved = _ELEMENT_BYTES * (rows * inputs + inputs * outputs + rows * outputs)
        own = 2 * rows * outputs * inputs / self.product_flops + moved / self._sheet_bytes
        return count * own + (1 if grouped else count) * self.kernel_s

    def attention_s(self, pairs: float, features: float) -> float:
        """Forward of flash attention: ``pairs`` of a query and a key, ``features`` of queries and values, all heads."""
        return 2 * pairs * features / self._attention_flops + self.kernel_s

    def elementwise_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Kernels that read and write ``moved_bytes`` together."""
        return moved_bytes / self._bytes + kernels * self.kernel_s
