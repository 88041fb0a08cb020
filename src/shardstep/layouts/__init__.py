"""The layout that an optimizer class admits: declared, known, or found by probing.

Reading order: `recipe` (a class with its options), `trial` (one run of it on small tensors),
`random_numbers` (detected and replaced), `compare` (tensors together, apart and in slices), `probe`
(the verdict), `cost` (operations per step), `state_size` and `choose` (known classes, and the
layout of each group).
"""
