#include <vector>

#include "arrays.hpp"
#include "phaze/collective.hpp"

namespace phaze::bindings {
namespace {

// Checks of scalar calls, which throw where a batch reports the status of a row.
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

// Seconds, algorithms and statuses of `rows` rows, which `fill` writes with the GIL released.
template <typename Fill>
py::tuple answered(py::ssize_t rows, const Fill& fill) {
  py::array_t<double> time_s(rows);
  py::array_t<std::uint8_t> algorithm(rows);
  py::array_t<std::uint8_t> status(rows);
  const CollectiveAnswer answer{writable(time_s), writable(algorithm), writable(status)};
  {
    const py::gil_scoped_release release;
    fill(answer);
  }
  return py::make_tuple(freeze(std::move(time_s)), freeze(std::move(algorithm)),
                        freeze(std::move(status)));
}

py::tuple batch(const py::object& fabrics, const py::object& fabric, const py::object& op,
                const py::object& bytes, const py::object& ranks, const py::object& stride,
                int threads, const py::object& outer_ranks, const py::object& outer_stride) {
  CollectiveQuery query;
  // The fabrics are copied: they are checked once and trusted afterwards, with the GIL released.
  const auto given = view<FabricRecord>(fabrics, "fabrics");
  const std::vector<FabricRecord> copies(given.begin(), given.end());
  query.fabrics = copies;
  query.bytes = view<double>(bytes, "payload_bytes");
  const auto rows = static_cast<py::ssize_t>(query.bytes.size());
  query.fabric = view<std::int32_t>(fabric, "fabric", rows);
  query.op = view<std::uint8_t>(op, "op", rows);
  query.ranks = view<std::int64_t>(ranks, "ranks", rows);
  query.stride = view<std::int64_t>(stride, "stride", rows);
  if (!outer_ranks.is_none() || !outer_stride.is_none()) {
    query.outer_ranks = view<std::int64_t>(outer_ranks, "outer_ranks", rows);
    query.outer_stride = view<std::int64_t>(outer_stride, "outer_stride", rows);
  }
  const int workers = checked_threads(threads);
  return answered(
      rows, [&](const CollectiveAnswer& answer) { collective_batch(query, answer, workers); });
}

py::tuple messages(const py::object& fabrics, const py::object& bytes, const py::object& from,
                   const py::object& to) {
  MessageQuery query{view<FabricRecord>(fabrics, "fabric", 1)[0], {}, {}, {}};
  query.bytes = view<double>(bytes, "payload_bytes");
  const auto rows = static_cast<py::ssize_t>(query.bytes.size());
  query.from = view<std::int64_t>(from, "source", rows);
  query.to = view<std::int64_t>(to, "target", rows);
  return answered(rows, [&](const CollectiveAnswer& answer) { message_batch(query, answer); });
}

py::tuple with_algorithm(const py::object& fabrics, int op, double bytes, std::int64_t ranks,
                         std::int64_t stride, int algorithm, std::int64_t outer_ranks,
                         std::int64_t outer_stride) {
  const auto fabric = view<FabricRecord>(fabrics, "fabrics", 1);
  const GroupShape shape{ranks, stride, outer_ranks, outer_stride};
  const CollectiveResult result =
      collective_with(fabric[0], checked_op(op), bytes, shape, checked_algorithm(algorithm));
  return py::make_tuple(result.time_s, static_cast<int>(result.algorithm),
                        static_cast<int>(result.status));
}

double bound(const py::object& fabrics, int op, double bytes, std::int64_t ranks,
             std::int64_t stride, std::int64_t outer_ranks, std::int64_t outer_stride) {
  const auto fabric = view<FabricRecord>(fabrics, "fabrics", 1);
  const GroupShape shape{ranks, stride, outer_ranks, outer_stride};
  return collective_bound_s(fabric[0], checked_op(op), bytes, shape);
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
  PYBIND11_NUMPY_DTYPE(ProtocolRecord, most_bytes, startup_s, step_s, share, copy_s_per_byte);
  PYBIND11_NUMPY_DTYPE(FabricRecord, kind, levels, devices, size, bytes_per_s, latency_s, wrap,
                       full_mesh, protocols, in_switch_startup_s, in_switch_share, protocol);
  module.attr("FABRIC_DTYPE") = py::dtype::of<FabricRecord>();
  module.attr("MAX_LEVELS") = kMaxLevels;
  module.attr("MAX_PROTOCOLS") = kMaxProtocols;
  module.attr("COLLECTIVE_OPS") = names<CollectiveOp>(kCollectiveOpCount);
  module.attr("ALGORITHMS") = names<Algorithm>(kAlgorithmCount);
  module.def("collective_batch", &batch, py::arg("fabrics"), py::arg("fabric"), py::arg("op"),
             py::arg("payload_bytes"), py::arg("ranks"), py::arg("stride"), py::arg("threads"),
             py::arg("outer_ranks") = py::none(), py::arg("outer_stride") = py::none());
  module.def("message_batch", &messages, py::arg("fabric"), py::arg("payload_bytes"),
             py::arg("source"), py::arg("target"));
  module.def("collective_with", &with_algorithm, py::arg("fabrics"), py::arg("op"),
             py::arg("payload_bytes"), py::arg("ranks"), py::arg("stride"), py::arg("algorithm"),
             py::arg("outer_ranks") = 1, py::arg("outer_stride") = 0);
  module.def("collective_bound", &bound, py::arg("fabrics"), py::arg("op"),
             py::arg("payload_bytes"), py::arg("ranks"), py::arg("stride"),
             py::arg("outer_ranks") = 1, py::arg("outer_stride") = 0);
}

}  // namespace phaze::bindings
