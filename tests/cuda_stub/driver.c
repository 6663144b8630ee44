/* A stand-in for NVIDIA's driver (libcuda.so.1): enough of it for torch, Triton and sgl-kernel to be imported, and for
   compiled kernels to be loaded and launched. A launch does nothing and reports success. */
typedef int Status;
typedef void *Handle;
enum { VERSION = 13000, ATTRIBUTE = 232448 /* shared memory of a block, the one attribute that matters */ };

#define SUCCEEDS(name, ...) Status name(__VA_ARGS__) { return 0; }
#define ANSWERS(name, answer, ...) Status name(__VA_ARGS__) { answer; return 0; }

SUCCEEDS(cuInit, unsigned flags)
ANSWERS(cuDriverGetVersion, *version = VERSION, int *version)
ANSWERS(cuGetErrorString, *text = "stub driver", int error, const char **text)
ANSWERS(cuDeviceGetCount, *count = 1, int *count)
ANSWERS(cuDeviceGet, *device = 0, int *device, int index)
ANSWERS(cuDeviceGetAttribute, *value = ATTRIBUTE, int *value, int attribute, int device)
ANSWERS(cuDevicePrimaryCtxGetState, *flags = 0; *active = 0, int device, unsigned *flags, int *active)
ANSWERS(cuDevicePrimaryCtxRetain, *context = (Handle)1, Handle *context, int device)
ANSWERS(cuCtxGetCurrent, *context = (Handle)1, Handle *context)
SUCCEEDS(cuCtxSetCurrent, Handle context)
ANSWERS(cuCtxGetDevice, *device = 0, int *device)
SUCCEEDS(cuPointerGetAttribute, void *value, int attribute, unsigned long long pointer)

ANSWERS(cuModuleLoad, *module = (Handle)2, Handle *module, const char *file)
ANSWERS(cuModuleLoadData, *module = (Handle)2, Handle *module, const void *image)
ANSWERS(cuModuleLoadDataEx, *module = (Handle)2, Handle *module, const void *image, unsigned count, void *options,
        void *values)
SUCCEEDS(cuModuleUnload, Handle module)
ANSWERS(cuModuleGetFunction, *function = (Handle)3, Handle *function, Handle module, const char *name)
ANSWERS(cuFuncGetAttribute, *value = 0, int *value, int attribute, Handle function)
SUCCEEDS(cuFuncSetAttribute, Handle function, int attribute, int value)
SUCCEEDS(cuFuncSetCacheConfig, Handle function, int config)
SUCCEEDS(cuLaunchKernel, Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
         unsigned shared, Handle stream, void **arguments, void **extra)
SUCCEEDS(cuLaunchKernelEx, void *config, Handle function, void **arguments, void **extra)
