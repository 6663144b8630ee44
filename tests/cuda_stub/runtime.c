/* A stand-in for the parts of the CUDA runtime that torch calls before it launches a kernel: one device, streams and
   events that are always done, and memory that is host memory. Preloaded, it lets a CUDA build of torch run its own
   autograd engine over fake tensors on cuda:0. No kernel can be launched through it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef void *Handle;
static const size_t MEMORY = (size_t)80 << 30;
enum { VERSION = 13000, TOTAL_MEMORY = 288 /* offset of cudaDeviceProp.totalGlobalMem in CUDA 13 */ };

#define SUCCEEDS(name, ...) Status name(__VA_ARGS__) { return 0; }
#define ANSWERS(name, answer, ...) Status name(__VA_ARGS__) { answer; return 0; }

/* the device */
ANSWERS(cudaGetDeviceCount, *count = 1, int *count)
ANSWERS(cudaGetDevice, *device = 0, int *device)
SUCCEEDS(cudaSetDevice, int device)
SUCCEEDS(cudaGetLastError, void)
SUCCEEDS(cudaPeekAtLastError, void)
ANSWERS(cudaDriverGetVersion, *version = VERSION, int *version)
ANSWERS(cudaRuntimeGetVersion, *version = VERSION, int *version)
SUCCEEDS(cudaDeviceSynchronize, void)
ANSWERS(cudaDeviceGetAttribute, *value = 1, int *value, int attribute, int device)
ANSWERS(cudaDeviceCanAccessPeer, *can = 0, int *can, int from, int to)
Status cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, 700);
    strcpy(properties, "stub device");
    memcpy(properties + TOTAL_MEMORY, &MEMORY, sizeof MEMORY);
    return 0;
}
Status cudaGetDeviceProperties_v2(char *properties, int device) { return cudaGetDeviceProperties(properties, device); }

/* streams and events */
ANSWERS(cudaDeviceGetStreamPriorityRange, *least = 0; *greatest = -5, int *least, int *greatest)
ANSWERS(cudaStreamCreateWithPriority, *stream = malloc(8), Handle *stream, unsigned flags, int priority)
SUCCEEDS(cudaStreamQuery, Handle stream)
SUCCEEDS(cudaStreamSynchronize, Handle stream)
SUCCEEDS(cudaStreamWaitEvent, Handle stream, Handle event, unsigned flags)
ANSWERS(cudaStreamIsCapturing, *status = 0, Handle stream, int *status)
ANSWERS(cudaStreamGetCaptureInfo_v2, *status = 0, Handle stream, int *status, void *a, void *b, void *c, void *d)
ANSWERS(cudaStreamGetCaptureInfo, *status = 0, Handle stream, int *status, void *a, void *b, void *c, void *d, void *e)
ANSWERS(cudaThreadExchangeStreamCaptureMode, *mode = 0, int *mode)
ANSWERS(cudaEventCreateWithFlags, *event = malloc(8), Handle *event, unsigned flags)
SUCCEEDS(cudaEventRecord, Handle event, Handle stream)
SUCCEEDS(cudaEventRecordWithFlags, Handle event, Handle stream, unsigned flags)
ANSWERS(cudaEventElapsedTime, *milliseconds = 0, float *milliseconds, Handle start, Handle end)
ANSWERS(cudaEventElapsedTime_v2, *milliseconds = 0, float *milliseconds, Handle start, Handle end)
SUCCEEDS(cudaEventQuery, Handle event)
SUCCEEDS(cudaEventSynchronize, Handle event)
ANSWERS(cudaEventDestroy, free(event), Handle event)

/* memory */
ANSWERS(cudaMalloc, *pointer = aligned_alloc(512, (size + 511) / 512 * 512), Handle *pointer, size_t size)
ANSWERS(cudaFree, free(pointer), Handle pointer)
ANSWERS(cudaHostAlloc, *pointer = malloc(size), Handle *pointer, size_t size, unsigned flags)
ANSWERS(cudaFreeHost, free(pointer), Handle pointer)
ANSWERS(cudaMemGetInfo, *available = *total = MEMORY, size_t *available, size_t *total)
ANSWERS(cudaMemsetAsync, memset(pointer, value, size), Handle pointer, int value, size_t size, Handle stream)
ANSWERS(cudaMemcpyAsync, memcpy(to, from, size), Handle to, const void *from, size_t size, int kind, Handle stream)
ANSWERS(cudaMemcpy, memcpy(to, from, size), Handle to, const void *from, size_t size, int kind)
ANSWERS(cudaPointerGetAttributes, memset(attributes, 0, 24), void *attributes, const void *pointer)
