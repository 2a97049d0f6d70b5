// The part of moe_ep._C that is low-latency mode.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels/low_latency.h"
#include "runtime/low_latency.h"

namespace py = pybind11;

namespace moe_ep {

void bind_low_latency(py::module_& m) {
  m.attr("LOW_LATENCY_SEND") = kSend;
  m.attr("LOW_LATENCY_RECEIVE") = kReceive;
  py::class_<LowLatencyShape>(m, "LowLatencyShape")
      .def(py::init([](int num_ranks, int num_experts, int num_slots, int hidden, int max_tokens) {
             return LowLatencyShape{num_ranks, num_experts, num_slots, hidden, max_tokens};
           }),
           py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_slots"), py::arg("hidden"),
           py::arg("max_tokens"));
  py::class_<LowLatencyCall>(m, "LowLatencyCall")
      .def(py::init([](const LowLatencyShape& shape, int tag, int parts, uintptr_t ticket) {
             return LowLatencyCall{shape, tag, parts, ticket};
           }),
           py::arg("shape"), py::arg("tag"), py::arg("parts"), py::arg("ticket"));
  using Dispatch = LowLatencyDispatchTensors;
  py::class_<Dispatch>(m, "LowLatencyDispatchTensors")
      .def(py::init<>())
      .def_readwrite("x", &Dispatch::x)
      .def_readwrite("topk_idx", &Dispatch::topk_idx)
      .def_readwrite("index", &Dispatch::index)
      .def_readwrite("rows", &Dispatch::rows)
      .def_readwrite("scales", &Dispatch::scales)
      .def_readwrite("recv_count", &Dispatch::recv_count)
      .def_readwrite("src_info", &Dispatch::src_info)
      .def_readwrite("slots", &Dispatch::slots)
      .def_readwrite("layout_range", &Dispatch::layout_range)
      .def_readwrite("expert_stats", &Dispatch::expert_stats)
      .def_readwrite("waiting_stats", &Dispatch::waiting_stats)
      .def_readwrite("topk_is_64_bit", &Dispatch::topk_is_64_bit)
      .def_readwrite("num_tokens", &Dispatch::num_tokens)
      .def_readwrite("fp8", &Dispatch::fp8)
      .def_readwrite("pack_scales", &Dispatch::pack_scales);
  using Combine = LowLatencyCombineTensors;
  py::class_<Combine>(m, "LowLatencyCombineTensors")
      .def(py::init<>())
      .def_readwrite("x", &Combine::x)
      .def_readwrite("slots", &Combine::slots)
      .def_readwrite("layout_range", &Combine::layout_range)
      .def_readwrite("index", &Combine::index)
      .def_readwrite("topk_idx", &Combine::topk_idx)
      .def_readwrite("topk_weights", &Combine::topk_weights)
      .def_readwrite("out", &Combine::out)
      .def_readwrite("waiting_stats", &Combine::waiting_stats)
      .def_readwrite("block_signals", &Combine::block_signals)
      .def_readwrite("blocks_per_expert", &Combine::blocks_per_expert)
      .def_readwrite("signal_value", &Combine::signal_value)
      .def_readwrite("expert_out", &Combine::expert_out)
      .def_readwrite("topk_is_64_bit", &Combine::topk_is_64_bit)
      .def_readwrite("num_tokens", &Combine::num_tokens);
  py::class_<LowLatency>(m, "LowLatency")
      .def(py::init<int, int, int>(), py::arg("device"), py::arg("rank"), py::arg("num_ranks"))
      .def("allocate", &LowLatency::allocate, py::return_value_policy::reference_internal)
      .def("release_memory", &LowLatency::release_memory)
      .def("memory", &LowLatency::memory, py::return_value_policy::reference_internal)
      .def("dispatch", &LowLatency::dispatch)
      .def("combine", &LowLatency::combine)
      .def("expert_out", &LowLatency::expert_out)
      .def("wait_expert_out", &LowLatency::wait_expert_out)
      .def("set_one_gpu", &LowLatency::set_one_gpu)
      .def("ping", &LowLatency::ping)
      .def("is_quiet", &LowLatency::is_quiet)
      .def("fault", &LowLatency::fault)
      .def("bad_peer", &LowLatency::bad_peer);
}

}  // namespace moe_ep
