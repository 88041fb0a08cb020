"""The layout that an optimizer class admits: declared, known, or found by probing.

Reading order: `recipe` (a class with its options), `trial` (one run of it on small tensors),
`compare` (tensors together, apart and in slices), `probe` (the verdict), `cost` (operations of a
step, bytes of state), `choose` (known classes, and the layout of each group).
"""
