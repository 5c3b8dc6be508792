"""Root file systems of sandboxes from folders, tarballs, images on disk and packages.

Modules, from the reference that people write to the folder that a sandbox is laid over:
``reference`` (which image), ``sources`` (its layers and settings), ``stream`` (the bytes of one layer),
``tree`` (applying it), ``cache`` (unpacked once, kept, evicted), ``holds`` (who uses it in this process).
"""
