"""
A model as both ends of a job describe it. Pure; imports errors only.

Begin with `fragments`: Tensor, the cut into fragments, its digest. `tensorfile` has the element types
and the header of safetensors files, `elements` reads their bytes as numbers, and `integers` divides
integers into digits that fp32 holds.
"""
