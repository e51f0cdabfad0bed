#include <vector>

#include "arrays.hpp"
#include "phaze/collective.hpp"

namespace phaze::bindings {
namespace {

// The same checks as a batch of one, so that a scalar call can name the fault.
CollectiveOp checked_op(int op) {
  if (op < 0 || op >= kCollectiveOpCount) {
    throw InvalidInput("op: " + std::to_string(op) +
                       " is not accepted; expected a code from 0 to " +
                       std::to_string(kCollectiveOpCount - 1));
  }
  return static_cast<CollectiveOp>(op);
}

Algorithm checked_algorithm(int algorithm) {
  if (algorithm < 0 || algorithm >= kAlgorithmCount) {
    throw InvalidInput("algorithm: " + std::to_string(algorithm) +
                       " is not accepted; expected a code from 0 to " +
                       std::to_string(kAlgorithmCount - 1));
  }
  return static_cast<Algorithm>(algorithm);
}

py::tuple batch(const py::object& fabrics, const py::object& fabric, const py::object& op,
                const py::object& bytes, const py::object& ranks, const py::object& stride,
                int threads) {
  CollectiveQuery query;
  // Copied: they are checked once and trusted afterwards, with the GIL released.
  const auto given = view<FabricRecord>(fabrics, "fabrics");
  const std::vector<FabricRecord> held(given.begin(), given.end());
  query.fabrics = held;
  query.bytes = view<double>(bytes, "payload_bytes");
  const auto rows = static_cast<py::ssize_t>(query.bytes.size());
  query.fabric = view<std::int32_t>(fabric, "fabric", rows);
  query.op = view<std::uint8_t>(op, "op", rows);
  query.ranks = view<std::int64_t>(ranks, "ranks", rows);
  query.stride = view<std::int64_t>(stride, "stride", rows);
  const int workers = checked_threads(threads);
  py::array_t<double> time_s(rows);
  py::array_t<std::uint8_t> algorithm(rows);
  py::array_t<std::uint8_t> status(rows);
  const CollectiveAnswer answer{writable(time_s), writable(algorithm), writable(status)};
  {
    const py::gil_scoped_release release;
    collective_batch(query, answer, workers);
  }
  return py::make_tuple(freeze(std::move(time_s)), freeze(std::move(algorithm)),
                        freeze(std::move(status)));
}

py::tuple with_algorithm(const py::object& fabrics, int op, double bytes, std::int64_t ranks,
                         std::int64_t stride, int algorithm) {
  const auto fabric = view<FabricRecord>(fabrics, "fabrics", 1);
  const CollectiveResult result = collective_with(fabric[0], checked_op(op), bytes, ranks, stride,
                                                  checked_algorithm(algorithm));
  return py::make_tuple(result.time_s, static_cast<int>(result.algorithm),
                        static_cast<int>(result.status));
}

double bound(const py::object& fabrics, int op, double bytes, std::int64_t ranks,
             std::int64_t stride) {
  const auto fabric = view<FabricRecord>(fabrics, "fabrics", 1);
  return collective_bound_s(fabric[0], checked_op(op), bytes, ranks, stride);
}

template <typename Enum>
py::tuple names(int count) {
  py::tuple all(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    all[static_cast<std::size_t>(i)] = py::str(name(static_cast<Enum>(i)));
  }
  return all;
}

}  // namespace

void bind_collective(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(FabricRecord, kind, levels, devices, size, bytes_per_s, latency_s, wrap);
  module.attr("FABRIC_DTYPE") = py::dtype::of<FabricRecord>();
  module.attr("MAX_LEVELS") = kMaxLevels;
  module.attr("COLLECTIVE_OPS") = names<CollectiveOp>(kCollectiveOpCount);
  module.attr("ALGORITHMS") = names<Algorithm>(kAlgorithmCount);
  module.def("collective_batch", &batch, py::arg("fabrics"), py::arg("fabric"), py::arg("op"),
             py::arg("payload_bytes"), py::arg("ranks"), py::arg("stride"), py::arg("threads"));
  module.def("collective_with", &with_algorithm, py::arg("fabrics"), py::arg("op"),
             py::arg("payload_bytes"), py::arg("ranks"), py::arg("stride"), py::arg("algorithm"));
  module.def("collective_bound", &bound, py::arg("fabrics"), py::arg("op"),
             py::arg("payload_bytes"), py::arg("ranks"), py::arg("stride"));
}

}  // namespace phaze::bindings
