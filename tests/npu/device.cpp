// A device whose memory is memory of the host and whose every kernel is the one of the CPU. It computes, and it is as
// strict as an accelerator: tensors on different devices do not mix, memory ends, what is not synchronised is not there.
#include "memory.h"
#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

namespace standin {
namespace {

using namespace c10;
constexpr auto kDevice = DeviceType::PrivateUse1;
const DispatchKeySet kKeys(DispatchKey::PrivateUse1);

Device here(std::optional<Device> asked = std::nullopt) {
  return Device(kDevice, asked && asked->has_index() ? asked->index() : (DeviceIndex)current_device());
}

// -- streams and events: kernels run at once, and copies are late -----------------------------------------------------

thread_local std::array<StreamId, kDevices> streams{};
using Clock = std::chrono::steady_clock;
constexpr auto kLast = std::numeric_limits<int64_t>::max();

// A copy between the device and pinned memory that nobody has waited for: its bytes arrive when somebody does. One to
// the host keeps the bytes of its moment. One to the device is late in queues of their own alone, for kernels follow it
// in that of the kernels. place: the memory of the device.
struct Underway {
  at::Tensor source, target;
  const char* place;
  bool to_host;
  StreamId queue;
  int64_t number;
  bool kernels_wait = false;
};
std::mutex mutex;
std::vector<Underway> underway;
int64_t queued = 0;

// What is waited for: the first copies of a queue. Only the host sees what is on the host.
void arrive(std::optional<StreamId> queue, int64_t last = kLast, bool at_host = true) {
  std::vector<Underway> arrived, others;  // they end after the lock does, because objects of Python may hang on them
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& each : underway) {
    const bool awaited = (!queue || each.queue == *queue) && each.number <= last && (at_host || !each.to_host);
    (awaited ? arrived : others).push_back(std::move(each));
  }
  underway.swap(others);
  for (auto& each : arrived) each.target.copy_(each.source);
}

pybind11::object* listener = nullptr;

void tell(const char* why) {
  if (!listener) return;
  pybind11::gil_scoped_acquire gil;
  (*listener)(why);
}

// The host waits for what this thread has queued.
void host_waits_here(const char* why) {
  arrive(streams[current_device()]);
  tell(why);
}

struct Recorded {
  Clock::time_point when;
  StreamId queue;
  int64_t last;
};

struct Guard final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override { return Device(kDevice, exchange_device(device.index())); }
  Device getDevice() const override { return here(); }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange_device(device.index()); }
  Stream getStream(Device device) const override {
    device = here(device);
    return Stream(Stream::UNSAFE, device, streams[device.index()]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, here(device)); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> last{0};
    return Stream(Stream::UNSAFE, here(device), ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto old = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Recorded;
    std::lock_guard<std::mutex> lock(mutex);
    *static_cast<Recorded*>(*event) = {Clock::now(), stream.id(), queued};
  }
  void block(void* event, const Stream& waiting) const override {
    const auto* own = static_cast<Recorded*>(event);
    arrive(own->queue, own->last, false);
    if (waiting.id()) return;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& each : underway) each.kernels_wait |= each.queue == own->queue && each.number <= own->last;
  }
  bool queryEvent(void* event) const override {
    const auto* own = static_cast<Recorded*>(event);
    arrive(own->queue, own->last);
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  bool queryStream(const Stream& stream) const override {
    arrive(stream.id());
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    arrive(stream.id());
    tell("synchronize stream");
  }
  void synchronizeEvent(void* event) const override {
    queryEvent(event);
    tell("synchronize event");
  }
  void synchronizeDevice(const DeviceIndex) const override { host_waits("synchronize device"); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    auto passed = static_cast<Recorded*>(to)->when - static_cast<Recorded*>(from)->when;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- random numbers: a generator per device, of the CPU's kind --------------------------------------------------------

struct DeviceGenerator : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index) {
    device_ = Device(kDevice, index);
    key_set_ = kKeys;
  }
};

at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int each = 0; each < kDevices; each++) made.push_back(at::make_generator<DeviceGenerator>(each));
    return made;
  }();
  return all.at(index < 0 ? current_device() : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device() : index);
  }
  Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Device getDeviceFromPtr(void*) const override { return here(); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto* own = storage.unsafeGetStorageImpl();
    DeviceGuard guard(own->device());
    auto fresh = device_allocator()->allocate(bytes);
    if (auto kept = std::min(own->nbytes(), bytes)) std::memcpy(fresh.get(), own->data(), kept);
    own->set_data_ptr_noswap(std::move(fresh));
    own->set_nbytes(bytes);
  }
};
const bool hooks_are_there = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// Operators whose result has a size that the device must tell.
const std::set<std::string> kSizedByData = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::repeat_interleave"};

// -- operators --------------------------------------------------------------------------------------------------------

at::Tensor on_device(const at::Tensor& made, Device device) {
  if (!made.defined() || !made.device().is_cpu()) return made;
  auto like = made.options().device(device);
  auto placed = made.is_non_overlapping_and_dense() ? at::empty_strided(made.sizes(), made.strides(), like)
                                                    : at::empty(made.sizes(), like);
  on_host(placed).copy_(made);
  return placed;
}

at::Tensor empty(
    at::SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  DeviceGuard guard(here(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  DeviceGuard guard(here(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kKeys,
      dtype_or_default(dtype));
}

void copy_later(const at::Tensor& source, const at::Tensor& target, StreamId queue) {
  const bool to_host = target.device().is_cpu();
  auto bytes = to_host ? on_host(source).to(target.scalar_type(), false, true) : source;
  auto there = on_host(target);
  if (target.scalar_type() == kBool) there.zero_();
  else std::memset(there.data_ptr(), 0xFF, there.nbytes());
  const auto* place = static_cast<const char*>((to_host ? source : target).const_data_ptr());
  std::lock_guard<std::mutex> lock(mutex);
  underway.push_back({bytes, there, place, to_host, queue, ++queued});
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool to_host = target.device().is_cpu(), from_host = source.device().is_cpu();
  const bool late = non_blocking && ((to_host && is_pinned(target.const_data_ptr())) ||
                                     (from_host && is_pinned(source.const_data_ptr())));
  const auto queue = streams[current_device()];
  if (late && target.is_contiguous() && (to_host || queue)) {
    copy_later(source, target, queue);
    return target;
  }
  if (to_host) host_waits_here("copy to the host");
  if (from_host && !late) host_waits_here("copy of pageable memory");
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  host_waits_here("item");
  return on_host(tensor).item();
}

at::Tensor as_strided(
    const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<SymInt> offset) {
  auto first = offset ? std::make_optional(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}
at::Tensor view(const at::Tensor& self, at::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize(const at::Tensor& self, at::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(
    at::Tensor& self, Storage storage, SymInt offset, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::cpu::set_(
      self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
void record_stream(at::Tensor&, Stream) {}

// Whether `parameter.data = other` may change the device of a parameter: with torch_npu it may.
bool takes_data_of(const at::Tensor& self, const at::Tensor& from) {
  auto is_plain = [](const at::Tensor& each) {
    return each.key_set().has(DispatchKey::CPU) || each.key_set().has(DispatchKey::PrivateUse1);
  };
  return self.key_set() == from.key_set() || (is_plain(self) && is_plain(from));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", takes_data_of);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", takes_data_of); }

// Everything else runs on the same bytes as the CPU's kernel.
class HostCall {
 public:
  HostCall(const OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    auto given = torch::jit::last(*stack_, schema_.arguments().size());
    arguments_.assign(given.begin(), given.end());
    find_device();
  }

  void run() {
    DeviceGuard guard(device_);
    if (kSizedByData.count(schema_.name())) host_waits_here(schema_.name().c_str());
    torch::jit::drop(*stack_, arguments_.size());
    for (size_t each = 0; each < arguments_.size(); each++) stack_->push_back(converted(each));
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    give_back();
  }

 private:
  void look_at(const at::Tensor& tensor) {
    // A number on the host may enter a kernel, as a number.
    if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0)) return;
    if (!found_) device_ = tensor.device();
    found_ = true;
    TORCH_CHECK(
        tensor.device() == device_ && tensor.device().type() == kDevice,
        "Expected all tensors to be on the same device, but ", schema_.name(), " got at least two devices, ", device_,
        " and ", tensor.device(), "!");
  }

  void find_device() {
    for (const auto& each : arguments_) {
      if (each.isTensor()) look_at(each.toTensor());
      else if (each.isTensorList()) for (const auto& part : each.toTensorVector()) look_at(part);
      else if (each.isOptionalTensorList())
        for (const std::optional<at::Tensor>& part : each.toOptionalTensorList()) {
          // Indices may lie on the host; they are brought, and the host waits for that.
          if (part && part->defined() && part->device().is_cpu()) host_waits_here("index on the host");
          else if (part) look_at(*part);
        }
      else if (each.isDevice() && !found_) device_ = here(each.toDevice());
    }
    if (!found_) device_ = here(device_);
  }

  bool is_written(size_t at) const {
    const auto* alias = schema_.arguments()[at].alias_info();
    return alias && alias->isWrite();
  }

  at::Tensor host(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
    // A kernel may give an empty result a size, which bytes of somebody else's cannot have.
    if (written && tensor.numel() == 0) {
      resized_.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(kCPU)));
      return resized_.back().second;
    }
    return on_host(tensor);
  }

  IValue converted(size_t at) {
    const auto& given = arguments_[at];
    const bool written = is_written(at);
    if (given.isTensor()) return host(given.toTensor(), written);
    if (given.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const auto& each : given.toTensorVector()) all.push_back(host(each, written));
      return IValue(all);
    }
    if (given.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& each : given.toOptionalTensorList())
        all.push_back(each ? std::make_optional(host(*each, written)) : std::nullopt);
      return IValue(all);
    }
    if (given.isDevice()) return IValue(Device(kCPU));
    if (given.isGenerator() || (given.isNone() && is_generator(at))) {
      device_generator_ = given.isNone() ? default_generator(device_.index()) : given.toGenerator();
      host_generator_ = at::make_generator<at::CPUGeneratorImpl>();
      host_generator_.set_state(device_generator_.get_state());
      return IValue(host_generator_);
    }
    return given;
  }

  bool is_generator(size_t at) const {
    auto type = schema_.arguments()[at].real_type();
    return type->str() == "Generator?";
  }

  void give_back() {
    if (host_generator_.defined()) device_generator_.set_state(host_generator_.get_state());
    for (auto& [own, computed] : resized_) {
      if (computed.numel() == 0) continue;
      own.resize_(computed.sizes());
      on_host(own).copy_(computed);
    }
    const auto& returns = schema_.returns();
    const size_t first = stack_->size() - returns.size();
    for (size_t each = 0; each < returns.size(); each++) {
      auto& slot = (*stack_)[first + each];
      const auto* alias = returns[each].alias_info();
      if (alias && alias->isWrite()) slot = written_argument(*alias);
      else if (slot.isTensor()) {
        TORCH_CHECK(!alias, "the stand-in lacks the view ", schema_.name(), ": register it in device.cpp");
        slot = on_device(slot.toTensor(), device_);
      } else if (slot.isTensorList()) {
        std::vector<at::Tensor> all;
        for (const auto& part : slot.toTensorVector()) all.push_back(on_device(part, device_));
        slot = IValue(all);
      }
    }
  }

  IValue written_argument(const AliasInfo& alias) const {
    for (size_t at = 0; at < arguments_.size(); at++) {
      const auto* own = schema_.arguments()[at].alias_info();
      if (own && *own == alias) return arguments_[at];
    }
    TORCH_CHECK(false, schema_.name(), " returns what no argument is");
  }

  const OperatorHandle& op_;
  const FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<IValue> arguments_;
  Device device_ = Device(kDevice);
  bool found_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized_;
  at::Generator device_generator_, host_generator_;
};

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) { HostCall(op, stack).run(); }

// Torch asks a new device for convolutions under these names.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  auto own = bias && bias->defined() ? std::make_optional(on_host(*bias)) : std::nullopt;
  auto made = at::convolution(
      on_host(input), on_host(weight), own, stride, padding, dilation, transposed, output_padding, groups);
  return on_device(made, input.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), at::IntArrayRef{weight.size(0)}, stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  auto place = input.device();
  return {on_device(of_input, place), on_device(of_weight, place), on_device(of_bias, place)};
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Torch would take these apart for a new device; real ones have kernels, and so has the CPU.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* whole : {"silu_backward", "native_layer_norm", "native_layer_norm_backward", "native_group_norm"})
    m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

void host_waits(const char* why) {
  arrive(std::nullopt);
  tell(why);
}

void before_free(const void* pointer, int64_t bytes) {
  std::vector<Underway> lost, others;
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& each : underway) {
    const bool inside = pointer <= each.place && each.place < static_cast<const char*>(pointer) + bytes;
    // What comes has no place any more. What leaves in a queue that the kernels do not wait for is overwritten first.
    if (inside && each.to_host && each.queue && !each.kernels_wait) std::memset(each.source.data_ptr(), 0xFF, each.source.nbytes());
    (inside && !each.to_host ? lost : others).push_back(std::move(each));
  }
  underway.swap(others);
}

void register_memory(pybind11::module& m) {
  m.def("set_count", &set_device_count);
  m.def("count", &device_count);
  m.def("current_device", &current_device);
  m.def("exchange_device", &exchange_device);
  m.def("exchange_owner", &exchange_owner);
  m.def("allocated", [](int device) { return account(device).live; });
  m.def("peak", [](int device) { return account(device).peak; });
  m.def("reserved", [](int device) { return account(device).reserved; });
  m.def("reserved_peak", [](int device) { return account(device).reserved_peak; });
  m.def("cap", [](int device) { return account(device).cap; });
  m.def("num_allocations", [](int device) { return account(device).allocations; });
  m.def("by_owner", [](int device) { return account(device).by_owner; });
  m.def("by_owner_at_peak", [](int device) { return account(device).by_owner_at_peak; });
  m.def("set_cap", [](int device, int64_t bytes) {
    change_account(device, [](Account& own, int64_t cap) { own.cap = cap; }, bytes);
  });
  m.def("empty_cache", [](int device) {
    change_account(device, [](Account& own, int64_t) { own.reserved = own.live; });
  });
  m.def("reset_peak", [](int device) {
    change_account(device, [](Account& own, int64_t) {
      own.peak = own.live;
      own.by_owner_at_peak = own.by_owner;
      own.reserved_peak = own.reserved;
    });
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("host_waits", [](const std::string& why) { host_waits(why.c_str()); });
  // Called with a reason each time the host waits for the device; None ends it.
  m.def("listen", [](const pybind11::object& heard) {
    delete listener;
    listener = heard.is_none() ? nullptr : new pybind11::object(heard);
  });
}

}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  standin::register_memory(m);
  standin::register_collectives(m);
}
