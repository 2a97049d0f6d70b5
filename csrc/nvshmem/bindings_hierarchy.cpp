// What moe_ep._C_nvshmem offers for exchanges between hosts. Plans, launches and communicators are
// those of moe_ep._C.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "nvshmem/low_latency_hosts.h"
#include "nvshmem/rail_exchange.h"

namespace py = pybind11;

namespace moe_ep {

void bind_hierarchy(py::module_& m) {
  py::module_::import("moe_ep._C");
  py::class_<RailConfig>(m, "RailConfig")
      .def(py::init<>())
      .def_readwrite("device", &RailConfig::device)
      .def_readwrite("host", &RailConfig::host)
      .def_readwrite("num_hosts", &RailConfig::num_hosts)
      .def_readwrite("local_rank", &RailConfig::local_rank)
      .def_readwrite("ranks_per_host", &RailConfig::ranks_per_host)
      .def_readwrite("num_local_experts", &RailConfig::num_local_experts)
      .def_readwrite("num_slots", &RailConfig::num_slots)
      .def_readwrite("max_row_bytes", &RailConfig::max_row_bytes)
      .def_readwrite("max_scales", &RailConfig::max_scales)
      .def_readwrite("chunk_tokens", &RailConfig::chunk_tokens);
  py::class_<RailRows>(m, "RailRows")
      .def(py::init<>())
      .def_readwrite("status", &RailRows::status)
      .def_readwrite("expert_of_slot", &RailRows::expert_of_slot)
      .def_readwrite("x", &RailRows::x)
      .def_readwrite("scales", &RailRows::scales)
      .def_readwrite("probs", &RailRows::probs)
      .def_readwrite("row_bytes", &RailRows::row_bytes)
      .def_readwrite("num_scales", &RailRows::num_scales)
      .def_readwrite("num_tokens", &RailRows::num_tokens)
      .def_readwrite("first_token", &RailRows::first_token);
  py::class_<RailSums>(m, "RailSums")
      .def(py::init<>())
      .def_readwrite("status", &RailSums::status)
      .def_readwrite("expert_of_slot", &RailSums::expert_of_slot)
      .def_readwrite("sums", &RailSums::sums)
      .def_readwrite("values", &RailSums::values)
      .def_readwrite("out", &RailSums::out)
      .def_readwrite("slot_values", &RailSums::slot_values)
      .def_readwrite("hidden", &RailSums::hidden)
      .def_readwrite("type", &RailSums::type)
      .def_readwrite("num_tokens", &RailSums::num_tokens)
      .def_readwrite("first_token", &RailSums::first_token);
  py::class_<Border>(m, "Border")
      .def_readonly("rows", &Border::rows)
      .def_readonly("bytes", &Border::bytes)
      .def_readonly("other_bytes", &Border::other_bytes);
  py::class_<RailExchange>(m, "RailExchange")
      .def(py::init<const RailConfig&>())
      .def("block_bytes", &RailExchange::block_bytes)
      .def("attach", &RailExchange::attach)
      .def("verdict", &RailExchange::verdict)
      .def("sums", &RailExchange::sums)
      .def("values", &RailExchange::values)
      .def("exchange_routing", &RailExchange::exchange_routing)
      .def("agree", &RailExchange::agree)
      .def("fetch_chunks", &RailExchange::fetch_chunks)
      .def("quantize", &RailExchange::quantize)
      .def("send_rows", &RailExchange::send_rows)
      .def("stage_rows", &RailExchange::stage_rows)
      .def("return_sums", &RailExchange::return_sums)
      .def("add_sums", &RailExchange::add_sums)
      .def("border", &RailExchange::border, py::call_guard<py::gil_scoped_release>());
  py::class_<HostsLowLatency, LowLatency>(m, "HostsLowLatency")
      .def(py::init<int, int, int, int, bool>(), py::arg("device"), py::arg("rank"),
           py::arg("num_ranks"), py::arg("ranks_per_host"), py::arg("by_slots"))
      .def_static("block_bytes", &HostsLowLatency::block_bytes)
      .def("attach", &HostsLowLatency::attach)
      .def("border", &HostsLowLatency::border, py::call_guard<py::gil_scoped_release>());
}

}  // namespace moe_ep
