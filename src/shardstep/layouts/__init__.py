"""The layout that an optimizer class admits: declared, known, or found by probing.

Reading order: `recipe` (a class with its options), `trial` (one run of it on small tensors),
`compare` (tensors together, apart and in slices), `probe` (the verdict), `state_size` and `cost`
(bytes and operations), `choose` (known classes, and the layout of each group).
"""
