// The Python module moe_ep._C_nvshmem: a table of contents.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "nvshmem/host.h"

namespace py = pybind11;

namespace moe_ep {
void bind_hierarchy(py::module_& m);  // csrc/nvshmem/bindings_hierarchy.cpp
}

using namespace moe_ep;  // NOLINT: this file only names what it binds

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void bind_host(py::module_& m) {
  m.def("loaded_version", &loaded_nvshmem_version);
  m.def("members", &nvshmem_members);
  m.def("is_running", &nvshmem_is_running);
  m.def("network_write_order", &network_write_order);
  m.def("unique_id", [] { return py::bytes(nvshmem_unique_id()); });
  py::class_<NvshmemHost>(m, "NvshmemHost")
      .def(py::init<int, int, int, const std::string&>(), py::arg("device"), py::arg("rank"),
           py::arg("num_ranks"), py::arg("members"))
      .def("start", &NvshmemHost::start, ReleaseGil())
      .def("allocate", &NvshmemHost::allocate, ReleaseGil())
      .def("free", &NvshmemHost::free, ReleaseGil())
      .def("peer_address", &NvshmemHost::peer_address)
      .def("finish", &NvshmemHost::finish, ReleaseGil())
      .def("ping", &NvshmemHost::ping, ReleaseGil())
      .def("missing_pings", &NvshmemHost::missing_pings, ReleaseGil())
      .def("ping_block_bytes", &NvshmemHost::ping_block_bytes)
      .def("gpu_sends", &NvshmemHost::gpu_sends);
}

}  // namespace

PYBIND11_MODULE(_C_nvshmem, m) {
  m.doc() = "NVSHMEM core of moe_ep: expert-parallel dispatch and combine between hosts";
  m.attr("ARCHITECTURES") = std::vector<std::string>{MOE_EP_ARCHITECTURES};  // "9.0"
  m.attr("NVSHMEM_VERSION") = compiled_nvshmem_version();
  bind_host(m);
  bind_hierarchy(m);
}
