"""Which layout an optimizer class needs: found by trying the class, if nobody knows.

Reading order: `unseen` (somebody's class is run and nothing shows of it), `trial` (on what it is
run), `same` (compared to the bit), `race` (together, apart and in slices), `constants` (in place of
random numbers), `probe` (the verdict), `beside` (dtypes that do not go together), `cost` (what a
step costs), `choose` (the layout of each group) with `overrides` (what no layout is right for).
"""
