// The Python module moe_ep._C: a table of contents.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "runtime/communicator.h"

namespace py = pybind11;

namespace moe_ep {
void bind_low_latency(py::module_& m);  // csrc/bindings_low_latency.cpp
}

using namespace moe_ep;  // NOLINT: this file only names what it binds

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_records(py::module_& m) {
  py::class_<CommunicatorConfig>(m, "CommunicatorConfig")
      .def(py::init<>())
      .def_readwrite("device", &CommunicatorConfig::device)
      .def_readwrite("rank", &CommunicatorConfig::rank)
      .def_readwrite("num_ranks", &CommunicatorConfig::num_ranks)
      .def_readwrite("num_experts", &CommunicatorConfig::num_experts)
      .def_readwrite("num_slots", &CommunicatorConfig::num_slots)
      .def_readwrite("max_row_bytes", &CommunicatorConfig::max_row_bytes)
      .def_readwrite("max_scales", &CommunicatorConfig::max_scales)
      .def_readwrite("exact_combine", &CommunicatorConfig::exact_combine)
      .def_readwrite("row_alignment", &CommunicatorConfig::row_alignment)
      .def_readwrite("num_hosts", &CommunicatorConfig::num_hosts)
      .def_readwrite("host", &CommunicatorConfig::host)
      .def_readwrite("chunk_tokens", &CommunicatorConfig::chunk_tokens);
  py::class_<Launch>(m, "Launch")
      .def(py::init([](uintptr_t stream, double timeout_s, int num_sms, bool bad_input) {
             return Launch{stream, timeout_s, num_sms, bad_input};
           }),
           py::arg("stream"), py::arg("timeout_s"), py::arg("num_sms"), py::arg("bad_input"));
  // Device addresses by position, for every call makes these: keywords cost the host time.
  py::class_<DispatchTensors>(m, "DispatchTensors")
      .def(py::init([](uintptr_t x, uintptr_t probs, int hidden, int type, int fp8) {
        return DispatchTensors{x, probs, hidden, type, fp8};
      }));
  py::class_<CombineTensors>(m, "CombineTensors")
      .def(py::init([](uintptr_t rows, uintptr_t weights, uintptr_t values, uintptr_t out,
                       uintptr_t slot_values, int hidden, int type) {
        return CombineTensors{rows, weights, values, out, slot_values, hidden, type};
      }));
  py::class_<Counts>(m, "Counts")
      .def_readonly("status", &Counts::status)
      .def_readonly("culprit", &Counts::culprit)
      .def_readonly("worst_rows", &Counts::worst_rows)
      .def_readonly("max_tokens", &Counts::max_tokens)
      .def_readonly("capacity", &Counts::capacity)
      .def_readonly("num_rows", &Counts::num_rows)
      .def_readonly("num_rank_rows", &Counts::num_rank_rows)
      .def_readonly("num_items", &Counts::num_items)
      .def_readonly("expert_rows", &Counts::expert_rows)
      .def_readonly("expert_count", &Counts::expert_count);
  py::class_<Fault>(m, "Fault")
      .def_readonly("rank", &Fault::rank)
      .def_readonly("peer", &Fault::peer)
      .def_readonly("phase", &Fault::phase)
      .def_readonly("operation", &Fault::operation)
      .def_readonly("expected", &Fault::expected)
      .def_readonly("seen", &Fault::seen);
}

void bind_plan(py::module_& m) {
  py::class_<PlanView>(m, "PlanView")
      .def(py::init([](uintptr_t header, uintptr_t row_of_slot, uintptr_t num_partials,
                       uintptr_t partial_slots, uintptr_t item_of_slot, int64_t num_tokens,
                       int num_slots) {
             PlanView plan{};
             plan.header = at<int32_t>(header);
             plan.row_of_slot = at<int32_t>(row_of_slot);
             plan.num_partials = at<int32_t>(num_partials);
             plan.partial_slots = at<int32_t>(partial_slots);
             plan.item_of_slot = at<int32_t>(item_of_slot);
             plan.num_tokens = num_tokens;
             plan.num_slots = num_slots;
             return plan;
           }),
           py::arg("header"), py::arg("row_of_slot"), py::arg("num_partials"),
           py::arg("partial_slots"), py::arg("item_of_slot"), py::arg("num_tokens"),
           py::arg("num_slots"))
      .def_readwrite("rows_limit", &PlanView::rows_limit)
      .def(
          "set_lists",
          [](PlanView& plan, uintptr_t rank_rows, uintptr_t items) {
            plan.rank_rows = at<RankRow>(rank_rows);
            plan.items = at<Item>(items);
          },
          py::arg("rank_rows"), py::arg("items"));
  m.attr("RANK_ROW_BYTES") = sizeof(RankRow);
  m.attr("ITEM_BYTES") = sizeof(Item);
  m.def("plan_header", [](int num_ranks, int num_local_experts) {
    const PlanHeader at = plan_header(num_ranks, num_local_experts);
    py::dict offsets;
    offsets["num_rows"] = at.num_rows;
    offsets["num_rank_rows"] = at.num_rank_rows;
    offsets["num_items"] = at.num_items;
    offsets["status"] = at.status;
    offsets["rank_row_begin"] = at.rank_row_begin;
    offsets["item_begin"] = at.item_begin;
    offsets["expert_begin"] = at.expert_begin;
    offsets["expert_count"] = at.expert_count;
    offsets["total"] = at.total;
    return offsets;
  });
}

void bind_communicator(py::module_& m) {
  py::enum_<Signal>(m, "Signal").value("HELLO", Signal::kHello).value("GOODBYE", Signal::kGoodbye);
  py::enum_<MemoryKind>(m, "MemoryKind")
      .value("IPC", MemoryKind::kIpc)
      .value("FD", MemoryKind::kFd);
  using Handles = std::vector<std::string>;
  py::class_<SymmetricMemory>(m, "SymmetricMemory")
      .def("handle", [](const SymmetricMemory& memory) { return py::bytes(memory.handle()); })
      .def("open", [](SymmetricMemory& memory, const Handles& h) { return memory.open(h); })
      .def("mark", &SymmetricMemory::mark)
      .def("missing_marks", &SymmetricMemory::missing_marks)
      .def("close", &SymmetricMemory::close)
      .def_property_readonly("max_tokens",
                             [](const SymmetricMemory& m) { return m.shape().max_tokens; })
      .def_property_readonly("num_bytes",
                             [](const SymmetricMemory& m) { return m.layout().total; });
  py::class_<Communicator>(m, "Communicator")
      .def(py::init<const CommunicatorConfig&>())
      .def("allocate", &Communicator::allocate, py::return_value_policy::reference_internal)
      .def("release_memory", &Communicator::release_memory)
      .def("memory", &Communicator::memory, py::return_value_policy::reference_internal)
      .def("plan_words", &Communicator::plan_words)
      .def("plan", &Communicator::plan)
      .def("notify", &Communicator::notify)
      .def("notify_hosts", &Communicator::notify_hosts)
      .def("fetch_lists", &Communicator::fetch_lists)
      .def("stage", &Communicator::stage)
      .def("dispatch", &Communicator::dispatch)
      .def("combine", &Communicator::combine)
      .def("wait_counts", &Communicator::wait_counts, py::call_guard<py::gil_scoped_release>())
      .def("is_quiet", &Communicator::is_quiet)
      .def("fault", &Communicator::fault)
      .def("last_wait", &Communicator::last_wait)
      .def("take_bad_peer", &Communicator::take_bad_peer)
      .def("sticky", &Communicator::sticky);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA core of moe_ep: expert-parallel dispatch and combine on one host";
  m.attr("ARCHITECTURES") = std::vector<std::string>{MOE_EP_ARCHITECTURES};  // "9.0"
  bind_records(m);
  bind_plan(m);
  bind_communicator(m);
  bind_low_latency(m);
}
