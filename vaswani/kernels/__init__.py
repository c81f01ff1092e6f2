"""Kernels for the CPU: Python beside C, one file for each kind of operation.

- `library`: find, check and load the compiled library, and say why there is none
- `product`, `attention`, `residual`, `loss`, `ranking`: operations, registered with torch as `torch.ops.vaswani.*`
- `weights`: a stack's weights as the kernels read them
- `encoder`, `decoder`: whole stacks for inference
- `checks`: what is looked at before C sees a tensor

They compute in single precision or with quantised weights, on a CPU with AVX2 or AVX-512. The package does all of it
with torch too, so nothing here is needed; `library.load()` is None where no library fits.
"""
