// GPUs without hardware, which torch takes for CUDA devices: see __init__.py. Operations run on the CPU's kernels.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "memory.h"

namespace {

using pretended_gpu::key;
using pretended_gpu::memory;

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kDevices = pretended_gpu::kDevices;
constexpr int kQueries = 2;  // that an event answers with "not yet"
constexpr auto kDelay = std::chrono::microseconds(500);

thread_local c10::DeviceIndex current_device_ = 0;
thread_local c10::StreamId current_stream[kDevices] = {};
thread_local bool computes = false;  // an operation's own copies to the CPU and back are no wait of the host

pretended_gpu::Key current_key(c10::DeviceIndex device) {
  return pretended_gpu::key(c10::Stream(c10::Stream::UNSAFE, {kDevice, device}, current_stream[device]));
}

template <bool kPinned>
struct PretendedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = kPinned
        ? memory().allocate(bytes, true)
        : memory().allocate(bytes, false, current_device_, current_key(current_device_));
    return {data, data, &give, kPinned ? c10::Device(c10::DeviceType::CPU) : c10::Device(kDevice, current_device_)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give;
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  static void give(void* data) {
    if (data) memory().free(static_cast<char*>(data), kPinned);
  }
};

PretendedAllocator<false> device_allocator;
PretendedAllocator<true> pinned_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator);

struct EventState {
  pretended_gpu::Key stream;
  uint64_t number;
  int queries;
  pretended_gpu::Clock clock;
  std::chrono::steady_clock::time_point at;
};

void host_waits(const EventState& event) {
  memory().finish(event.stream, event.number);
  pretended_gpu::host_clock().merge(event.clock);
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  GuardImpl() = default;
  explicit GuardImpl(c10::DeviceType) {}
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current_device_}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device_ = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : current_device_;
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, index}, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<int64_t> given[kDevices];
    auto index = device.has_index() ? device.index() : current_device_;
    auto turn = given[index]++ % pretended_gpu::kStreams;
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, index}, 1 + index * pretended_gpu::kStreams + turn);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventState();
    *static_cast<EventState*>(*event) = EventState{
        key(stream), memory().newest(), 0, memory().clock(key(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* state = static_cast<EventState*>(event);
    if (state == nullptr) return;
    memory().finish(state->stream, state->number);
    memory().come_after(key(stream), state->clock);
  }
  bool queryEvent(void* event) const override {
    auto* state = static_cast<EventState*>(event);
    if (state == nullptr || memory().is_done(state->stream, state->number)) return true;
    if (++state->queries <= kQueries) return false;
    host_waits(*state);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    auto* state = static_cast<EventState*>(event);
    if (state == nullptr) return;
    auto known = *state;
    std::this_thread::sleep_for(kDelay);
    host_waits(known);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *begin = static_cast<EventState*>(first), *end = static_cast<EventState*>(second);
    TORCH_CHECK(begin != nullptr && end != nullptr, "an event is not recorded");
    return std::chrono::duration<double, std::milli>(end->at - begin->at).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return memory().is_done(key(stream), memory().newest());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    memory().finish(key(stream), memory().newest());
    pretended_gpu::host_clock().merge(memory().clock(key(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    TORCH_CHECK(false, "a device is not waited for as a whole");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().record(static_cast<char*>(data.get_context()), key(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, GuardImpl);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current_device_; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device_; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device_ = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device_, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device_ : std::exchange(current_device_, index);
  }
  bool isPinnedPtr(const void* data) const override { return memory().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};
void grow(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  auto data = device_allocator.allocate(bytes);
  std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(kDevice, current_device_));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(kDevice, current_device_));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
at::Tensor as_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor.detach();
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  c10::Device device = self.is_cpu() ? target.device() : self.device();
  auto stream = current_key(device.index());
  bool across = self.is_cpu() != target.is_cpu();
  bool plain = self.is_contiguous() && target.is_contiguous() && self.dtype() == target.dtype() &&
      self.sizes() == target.sizes() && self.numel() > 0;
  auto* source = static_cast<const char*>(self.data_ptr());
  auto* there = static_cast<char*>(target.data_ptr());
  if (non_blocking && across && plain && memory().is_pinned(self.is_cpu() ? source : there)) {
    memory().start(stream, source, there, self.nbytes());
    return target;
  }
  if (!across && !self.is_cpu() && self.device() != target.device() && plain) {
    memory().start_across(stream, current_key(target.device().index()), source, there, self.nbytes());
    return target;
  }
  auto other = current_key(target.is_cpu() ? device.index() : target.device().index());
  memory().finish(stream, memory().newest());
  memory().come_after(stream, memory().clock(other));
  memory().work(stream, {source}, {there});
  memory().come_after(other, memory().clock(stream));
  if (target.is_cpu() && !computes) pretended_gpu::host_clock().merge(memory().clock(stream));
  at::AutoDispatchBelowADInplaceOrView guard;
  as_host(target).copy_(as_host(self));
  return target;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  copy_from(self.sizes() == source.sizes() ? source : source.expand(self.sizes()), self, non_blocking);
  return self;
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (bytes > self.storage().nbytes()) grow(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

void check_places(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  std::optional<c10::Device> known;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    TORCH_CHECK(
        !known || *known == tensor.device(), op.schema().name(), ": tensors are on ", *known, " and on ",
        tensor.device());
    known = tensor.device();
  };
  for (const auto& value : torch::jit::last(stack, arguments.size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorList()) look(tensor);
  }
}

// The tensors among these values that are on a device, as what its stream that is current uses.
void look_for(const c10::IValue& value, std::map<pretended_gpu::Key, std::vector<const void*>>& found) {
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.numel() == 0) return;
    found[current_key(tensor.device().index())].push_back(tensor.data_ptr());
  };
  if (value.isTensor()) look(value.toTensor());
  if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorList()) look(tensor);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_places(op, *stack);
  std::map<pretended_gpu::Key, std::vector<const void*>> read, written;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto* alias = arguments[i].alias_info();
    look_for(torch::jit::peek(*stack, i, arguments.size()), alias && alias->isWrite() ? written : read);
  }
  for (auto& [stream, data] : read) memory().work(stream, data, {});
  for (auto& [stream, data] : written) memory().work(stream, {}, data);
  auto before = std::exchange(computes, true);
  at::native::cpu_fallback(op, stack);
  computes = before;
  written.clear();
  for (const auto& value : torch::jit::last(*stack, op.schema().returns().size())) look_for(value, written);
  for (auto& [stream, data] : written) memory().work(stream, {}, data);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  memory().record(static_cast<char*>(self.storage().data_ptr().get_context()), key(stream));
}

std::optional<at::Tensor> as_host(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<at::Tensor>(as_host(*tensor)) : std::nullopt;
}

// Its schema does not say that it writes to the running statistics, so the fallback would lose that.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto [output, saved_mean, saved_scale] = at::native_batch_norm(
      as_host(input), as_host(weight), as_host(bias), as_host(mean), as_host(variance), training, momentum, eps);
  auto device = input.device();
  return {output.to(device), saved_mean.to(device), saved_scale.to(device)};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

extern "C" {
size_t pretended_gpu_allocated(int device) { return memory().allocated(device); }
size_t pretended_gpu_most_allocated(int device) { return memory().most_allocated(device); }
void pretended_gpu_forget_most(int device) { memory().forget_most(device); }
}

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
