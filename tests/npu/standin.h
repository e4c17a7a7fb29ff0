// What the files of the stand-in share.
#pragma once
#include <torch/extension.h>

namespace standin {

// The same bytes as a tensor of the CPU: what is written to one stands in the other.
at::Tensor on_host(const at::Tensor& tensor);

void register_memory(pybind11::module& module);
void register_collectives(pybind11::module& module);

// Tell the listener that the host waits for the device, and let copies that are under way arrive.
void host_waits(const char* why);

}  // namespace standin
