// "hccl": gloo's collectives over the same bytes, as strict as the real one about where tensors live.
#include "standin.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace standin {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Handle = c10::intrusive_ptr<c10d::Work>;

at::Tensor host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone(), "hccl exchanges tensors of the NPU, not of ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "hccl exchanges contiguous tensors");
  return on_host(tensor);
}
Tensors host(const Tensors& tensors) {
  Tensors all;
  for (const auto& each : tensors) all.push_back(host(each));
  return all;
}
Lists host(const Lists& lists) {
  Lists all;
  for (const auto& each : lists) all.push_back(host(each));
  return all;
}
// Some of gloo's handles write their result when they are waited for, and once more when they are waited for again.
struct Done final : c10d::Work {
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};
Handle done(Handle work) {
  work->wait();
  return c10::make_intrusive<Done>();
}

struct Hccl final : c10d::Backend {
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }

  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto own = host(tensors);
    return done(gloo_->broadcast(own, options));
  }
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto own = host(tensors);
    auto summed = options;
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) summed.reduceOp = c10d::ReduceOp::SUM;
    auto work = done(gloo_->allreduce(own, summed));
    if (mean) for (auto& each : own) each.div_(getSize());
    return work;
  }
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Handle work;
    for (auto& each : tensors) {
      Tensors one{each};
      work = allreduce(one, options);
    }
    return work;
  }
  Handle allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return done(gloo_->allgather(out, in, options));
  }
  Handle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = host(output), in = host(input);
    return done(gloo_->_allgather_base(out, in, options));
  }
  Handle allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Handle work;
    for (size_t each = 0; each < outputs.size(); each++) work = _allgather_base(outputs[each], inputs[each], options);
    return work;
  }
  Handle _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto out = host(output), in = host(input);
    auto summed = options;
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) summed.reduceOp = c10d::ReduceOp::SUM;
    auto work = done(gloo_->_reduce_scatter_base(out, in, summed));
    if (mean) out.div_(getSize());
    return work;
  }
  Handle reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return done(gloo_->reduce_scatter(out, in, options));
  }
  Handle reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Handle work;
    for (size_t each = 0; each < outputs.size(); each++)
      work = _reduce_scatter_base(outputs[each], inputs[each], options);
    return work;
  }
  Handle alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto out = host(output), in = host(input);
    return done(gloo_->alltoall_base(out, in, output_sizes, input_sizes, options));
  }
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto own = host(tensors);
    return done(gloo_->reduce(own, options));
  }
  Handle scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return done(gloo_->scatter(out, in, options));
  }
  Handle gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return done(gloo_->gather(out, in, options));
  }
  Handle send(Tensors& tensors, int to, int tag) override {
    auto own = host(tensors);
    return done(gloo_->send(own, to, tag));
  }
  Handle recv(Tensors& tensors, int from, int tag) override {
    auto own = host(tensors);
    return done(gloo_->recv(own, from, tag));
  }
  Handle barrier(const c10d::BarrierOptions&) override { return done(gloo_->barrier(c10d::BarrierOptions())); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

void register_collectives(pybind11::module& m) {
  m.def(
      "hccl",
      [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Hccl>(std::move(gloo));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace standin
