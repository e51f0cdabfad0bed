// An all-reduce on DGX A100 nodes, from C++: one batch of sizes and group widths, priced by the
// fastest algorithm, and how far each is from what the links allow at best.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "phaze/collective.hpp"

namespace {

using phaze::CollectiveOp;

// As phaze_fast/hardware/data/fabrics/dgx-a100.yaml: eight to a node, then as many as there are.
phaze::FabricRecord dgx_a100() {
  phaze::FabricRecord fabric{};
  fabric.kind = static_cast<std::int32_t>(phaze::FabricKind::kSwitched);
  fabric.levels = 2;
  fabric.size[0] = 8;
  fabric.bytes_per_s[0] = 300e9;
  fabric.latency_s[0] = 3e-6;
  fabric.bytes_per_s[1] = 25e9;  // 200 Gb/s
  fabric.latency_s[1] = 5e-6;
  return fabric;
}

}  // namespace

int main() {
  const std::vector<phaze::FabricRecord> fabrics{dgx_a100()};
  std::vector<double> bytes;
  std::vector<std::int64_t> ranks;
  for (const std::int64_t group : {8, 64, 512}) {
    for (const double size : {1e3, 1e6, 1e9}) {
      bytes.push_back(size);
      ranks.push_back(group);
    }
  }
  const std::size_t rows = bytes.size();
  const std::vector<std::int32_t> fabric(rows, 0);
  const std::vector<std::uint8_t> op(rows, static_cast<std::uint8_t>(CollectiveOp::kAllReduce));
  const std::vector<std::int64_t> stride(rows, 1);
  std::vector<double> time_s(rows);
  std::vector<std::uint8_t> algorithm(rows), status(rows);
  phaze::collective_batch({fabrics, fabric, op, bytes, ranks, stride}, {time_s, algorithm, status},
                          /*threads=*/2);

  std::printf("%6s %8s %12s %9s  %s\n", "ranks", "bytes", "time_us", "of_bound", "algorithm");
  for (std::size_t i = 0; i < rows; ++i) {
    if (const auto state = static_cast<phaze::Status>(status[i]); state != phaze::Status::kOk) {
      std::fprintf(stderr, "row %zu: %s\n", i, phaze::sentence(state));
      return 1;
    }
    const double bound_s = phaze::collective_bound_s(fabrics[0], CollectiveOp::kAllReduce, bytes[i],
                                                     ranks[i], stride[i]);
    std::printf("%6lld %8.0e %12.3f %9.4f  %s\n", static_cast<long long>(ranks[i]), bytes[i],
                1e6 * time_s[i], bound_s / time_s[i],
                phaze::name(static_cast<phaze::Algorithm>(algorithm[i])));
  }
  return 0;
}
