"""x @ weight_t with a weight stored input-major; the one GEMM of all projections on CPU.

In deterministic mode a row's bits depend on that row and the weight alone: BLAS picks its kernel, and with it the
order of the additions, by the number of rows, so every call is cut into calls of one fixed number of rows.
"""

from torch import Tensor

from worker_svc.ops.matmul import ref

DETERMINISTIC_ROWS = ref.ROWS


def rows_agree(weight_t: Tensor) -> bool:
    """True if this machine's BLAS gives equal rows of a fixed-size product equal bits, wherever they stand."""
    return ref.rows_agree(weight_t)


def matmul(x: Tensor, weight_t: Tensor, *, deterministic: bool = False) -> Tensor:
    """[S, K] @ [K, N] -> [S, N], FP32."""
    assert x.dim() == 2 and weight_t.dim() == 2 and x.shape[1] == weight_t.shape[0], (x.shape, weight_t.shape)
    return ref.fixed_rows(x, weight_t) if deterministic else x @ weight_t
