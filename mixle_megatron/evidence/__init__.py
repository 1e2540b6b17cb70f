"""Evidence for what is claimed: real updates on this host, held against one rank in fp32.

:mod:`claims` lists what is run for each claim, :mod:`trial` runs it on ranks, :mod:`local_ranks` starts
those, and :mod:`verification` judges what comes of it. :mod:`record` is the evidence as plain data,
:mod:`origin` says of which versions and machine it is, and :mod:`store` keeps it. What a rank does loads
torch (:mod:`trial`, :mod:`plain`), as does :mod:`numerics`, which brings it into mixle's declarations.
"""
