"""The command ``ckpt``. One file for each command; everything that is worth testing twice is in the library."""
