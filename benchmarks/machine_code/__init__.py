"""The machine code of the Triton kernels, made and read without a GPU: `make gpu-compile`.

Triton brings NVIDIA's assembler and disassembler along, which need no device. So every specialisation of every kernel
is compiled for GPUs of three generations here, and the machine code is held against bars: registers, shared memory,
spills, tensor cores. It says nothing about time.
"""
