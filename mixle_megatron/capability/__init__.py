"""What a host executes: facts, which are plain data, and a decision, which is a pure function of them.

:mod:`facts` says what is known of a host, and :mod:`gather` finds it out. :mod:`decide` makes the table of
capabilities of it, :mod:`hazards` says what is worth a look, and :mod:`refusals` gives the faults of a
precision that this host cannot have. Only :mod:`imports` and :mod:`torch_devices` load torch.
"""
