// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime without a device, compiled against NVIDIA's headers: a call whose signature is not
// that of the header does not compile. Streams are queues that one thread works off; "device memory"
// is what `stub_adopt` was told of. Of several streams that can go on, the youngest goes first, so
// that whoever relies on the order of calls sees it broken. It is as strict as the real one where
// that is known: the default stream takes no batch, only page-locked memory is reached by a batch,
// a source is read in the order of its stream.
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

using Clock = std::chrono::steady_clock;

struct CUevent_st {
  int recordings = 0, reached = 0;
  Clock::time_point at;
};

namespace {
enum class Kind { copy, record, wait };
struct Operation {
  Kind kind;
  void *target = nullptr;
  const void *source = nullptr;
  size_t size = 0;
  CUevent_st *event = nullptr;
  int recording = 0;  // of the event, counted from 1
};
}  // namespace

struct CUstream_st {
  std::deque<Operation> queue;
};

namespace {
struct Stub {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<CUstream_st *> streams;
  std::set<CUevent_st *> events;
  std::map<char *, size_t> locked, device;
  std::thread worker;
  bool ends = false;
  cudaError_t last = cudaSuccess;
  int device_index = -1, captures_relaxed = 0;
  long copies = 0, batches = 0;
};

Stub &stub() {
  static Stub *one = new Stub;  // never destroyed: its thread may outlive `main`
  return *one;
}

cudaError_t fail(cudaError_t code) { return stub().last = code; }

bool holds(const std::map<char *, size_t> &ranges, const void *address, size_t size) {
  auto at = static_cast<const char *>(address);
  for (auto &[first, length] : ranges)
    if (first <= at && at + size <= first + length) return true;
  return false;
}

bool knows(cudaStream_t stream) {
  for (auto *each : stub().streams)
    if (each == stream) return true;
  return false;
}

// With the mutex held; false where no stream can go on.
bool go_on() {
  auto &streams = stub().streams;
  for (auto each = streams.rbegin(); each != streams.rend(); ++each) {
    auto &queue = (*each)->queue;
    if (queue.empty()) continue;
    auto &first = queue.front();
    if (first.kind == Kind::wait && first.event->reached < first.recording) continue;
    if (first.kind == Kind::copy) std::memcpy(first.target, first.source, first.size);
    if (first.kind == Kind::record) {
      first.event->reached = first.recording;
      first.event->at = Clock::now();
    }
    queue.pop_front();
    stub().changed.notify_all();
    return true;
  }
  return false;
}

void work() {
  std::unique_lock<std::mutex> held(stub().mutex);
  while (!stub().ends)
    if (!go_on()) stub().changed.wait(held);
}

void put(cudaStream_t stream, const Operation &operation) {
  stream->queue.push_back(operation);
  stub().changed.notify_all();
}

cudaError_t check_copy(const void *target, const void *source, size_t size) {
  // What the copy engine reaches: the device's memory, and one locked piece of the host's.
  for (auto *address : {target, source})
    if (!holds(stub().device, address, size) && !holds(stub().locked, address, size))
      return cudaErrorInvalidValue;
  return size ? cudaSuccess : cudaErrorInvalidValue;
}

// Everything of a batch but its arrays' types, which differ between the versions.
cudaError_t copy_all(void *const *targets, const void *const *sources, const size_t *sizes, size_t count,
                     cudaMemcpyAttributes *attributes, size_t *first_of, size_t num_attributes,
                     cudaStream_t stream, size_t *failed) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!knows(stream)) return fail(cudaErrorInvalidResourceHandle);
  if (num_attributes != 1 || first_of[0] != 0) return fail(cudaErrorInvalidValue);
  if (attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream) return fail(cudaErrorInvalidValue);
  if (attributes->flags != cudaMemcpyFlagPreferOverlapWithCompute) return fail(cudaErrorInvalidValue);
  for (size_t i = 0; i < count; i++)
    if (auto code = check_copy(targets[i], sources[i], sizes[i]); code != cudaSuccess) {
      if (failed) *failed = i;
      return fail(code);
    }
  // Backwards: the copies of a batch have no order.
  for (size_t i = count; i-- > 0;) put(stream, {Kind::copy, targets[i], sources[i], sizes[i]});
  stub().copies += count;
  stub().batches++;
  return cudaSuccess;
}
}  // namespace

extern "C" {
// What tests ask and tell.
void stub_adopt(void *address, size_t size) {
  std::unique_lock<std::mutex> held(stub().mutex);
  stub().device[static_cast<char *>(address)] = size;
}
void stub_forget(void *address) {
  std::unique_lock<std::mutex> held(stub().mutex);
  stub().device.erase(static_cast<char *>(address));
}
void stub_begin() {
  stub().ends = false;
  stub().worker = std::thread(work);
}
void stub_end() {
  {
    std::unique_lock<std::mutex> held(stub().mutex);
    stub().ends = true;
    stub().changed.notify_all();
  }
  stub().worker.join();
}
int stub_device() { return stub().device_index; }
int stub_relaxed() { return stub().captures_relaxed; }
long stub_batches() { return stub().batches; }
// Handles that were made and not destroyed, and pieces that are locked.
long stub_held() {
  std::unique_lock<std::mutex> held(stub().mutex);
  return stub().streams.size() + stub().events.size() + stub().locked.size();
}

cudaError_t CUDARTAPI cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
const char *CUDARTAPI cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorInvalidValue            ? "cudaErrorInvalidValue"
         : code == cudaErrorInvalidResourceHandle ? "cudaErrorInvalidResourceHandle"
                                                  : "cudaErrorOfTheStub";
}
const char *CUDARTAPI cudaGetErrorString(cudaError_t) { return "what the stub says"; }
cudaError_t CUDARTAPI cudaGetLastError() {
  auto code = stub().last;
  stub().last = cudaSuccess;
  return code;
}
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  stub().device_index = device;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  stub().captures_relaxed += *mode == cudaStreamCaptureModeRelaxed;
  *mode = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
  if (flags != cudaStreamNonBlocking || priority != 0) return fail(cudaErrorInvalidValue);
  std::unique_lock<std::mutex> held(stub().mutex);
  stub().streams.push_back(*stream = new CUstream_st);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!knows(stream)) return fail(cudaErrorInvalidResourceHandle);
  stub().changed.wait(held, [&] { return stream->queue.empty(); });
  for (auto each = stub().streams.begin(); each != stub().streams.end(); ++each)
    if (*each == stream) {
      stub().streams.erase(each);
      break;
    }
  delete stream;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!knows(stream) || !stub().events.count(event)) return fail(cudaErrorInvalidResourceHandle);
  if (flags != 0) return fail(cudaErrorInvalidValue);
  // Never recorded: nothing to wait for.
  put(stream, {Kind::wait, nullptr, nullptr, 0, event, event->recordings});
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  if (flags != cudaEventBlockingSync) return fail(cudaErrorInvalidValue);
  std::unique_lock<std::mutex> held(stub().mutex);
  stub().events.insert(*event = new CUevent_st);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  std::unique_lock<std::mutex> held(stub().mutex);
  // Kept in memory: a stream may still wait for it.
  return stub().events.erase(event) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!knows(stream) || !stub().events.count(event)) return fail(cudaErrorInvalidResourceHandle);
  put(stream, {Kind::record, nullptr, nullptr, 0, event, ++event->recordings});
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!stub().events.count(event)) return fail(cudaErrorInvalidResourceHandle);
  return event->reached == event->recordings ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!stub().events.count(event)) return fail(cudaErrorInvalidResourceHandle);
  auto last = event->recordings;
  stub().changed.wait(held, [&] { return event->reached >= last; });
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!start->reached || !end->reached) return fail(cudaErrorInvalidResourceHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpyAsync(void *target, const void *source, size_t size,
                                      enum cudaMemcpyKind kind, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (!knows(stream)) return fail(cudaErrorInvalidResourceHandle);
  bool to_host = kind == cudaMemcpyDeviceToHost;
  if (!to_host && kind != cudaMemcpyHostToDevice) return fail(cudaErrorInvalidMemcpyDirection);
  if (!holds(stub().device, to_host ? source : target, size)) return fail(cudaErrorInvalidValue);
  if (!holds(stub().locked, to_host ? target : source, size)) {  // ordinary memory: the caller waits
    put(stream, {Kind::copy, target, source, size});
    stub().changed.wait(held, [&] { return stream->queue.empty(); });
    return cudaSuccess;
  }
  put(stream, {Kind::copy, target, source, size});
  stub().copies++;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostRegister(void *address, size_t size, unsigned int flags) {
  std::unique_lock<std::mutex> held(stub().mutex);
  if (flags != cudaHostRegisterDefault || !size) return fail(cudaErrorInvalidValue);
  auto at = static_cast<char *>(address);
  for (auto &[first, length] : stub().locked)
    if (first < at + size && at < first + length) return fail(cudaErrorHostMemoryAlreadyRegistered);
  stub().locked[at] = size;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostUnregister(void *address) {
  std::unique_lock<std::mutex> held(stub().mutex);
  return stub().locked.erase(static_cast<char *>(address)) ? cudaSuccess
                                                            : fail(cudaErrorHostMemoryNotRegistered);
}
#if CUDART_VERSION >= 13000
cudaError_t CUDARTAPI cudaMemcpyBatchAsync(void *const *targets, const void *const *sources,
                                           const size_t *sizes, size_t count,
                                           cudaMemcpyAttributes *attributes, size_t *first_of,
                                           size_t num_attributes, cudaStream_t stream) {
  return copy_all(targets, sources, sizes, count, attributes, first_of, num_attributes, stream, nullptr);
}
#else
cudaError_t CUDARTAPI cudaMemcpyBatchAsync(void **targets, void **sources, size_t *sizes, size_t count,
                                           cudaMemcpyAttributes *attributes, size_t *first_of,
                                           size_t num_attributes, size_t *failed, cudaStream_t stream) {
  return copy_all(targets, sources, sizes, count, attributes, first_of, num_attributes, stream, failed);
}
#endif
}
