"""Operations of a decode step as Triton kernels: tensors in, tensors out; `reference` says what each computes."""
