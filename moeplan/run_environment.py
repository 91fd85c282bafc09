"""What the processes of a run find in their environment, however they are started.

``CUDA_DEVICE_MAX_CONNECTIONS`` is left at the driver's default of 8. Megatron-LM sets 1, so that its tensor-parallel
collectives begin before the GEMMs issued after them; here no work depends on the order of launches, and with one
connection the gradients, weights and exchanges that travel beside layers would wait for their kernels.
"""

# Blocks of ever other sizes, as dropless exchanges ask for, held 13.6 GiB idle on each of two H200 (h200-fine, ep 2)
# where segments could not grow. The report's runs set this as well (section 11).
ALLOCATOR_VARIABLE, GROWING_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
RUN_ENVIRONMENT = {ALLOCATOR_VARIABLE: GROWING_SEGMENTS}
