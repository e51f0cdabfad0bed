// The same bits on every machine: a hash over many results, equal for g++ and clang++, aarch64 and
// x86-64. A change of a formula changes it, and the commit that does so says why.
#include <bit>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "check.hpp"
#include "phaze/collective.hpp"
#include "phaze/silicon.hpp"

namespace {

using namespace phaze;

class Numbers {  // a linear congruential generator: integers only, so alike everywhere
 public:
  std::uint64_t next() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return state_ >> 33;
  }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_ = 20240721;
};

class Hash {  // FNV-1a over the bytes of each number
 public:
  void add(double value) {
    auto bits = std::bit_cast<std::uint64_t>(value);
    for (int byte = 0; byte < 8; ++byte, bits >>= 8) {
      value_ = (value_ ^ (bits & 0xff)) * 1099511628211ULL;
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037ULL;
};

FabricRecord random_fabric(Numbers& numbers) {
  FabricRecord fabric{};
  fabric.kind = static_cast<std::int32_t>(numbers.below(2));
  fabric.levels = static_cast<std::int32_t>(numbers.below(4)) + 1;
  for (int l = 0; l < fabric.levels; ++l) {
    fabric.size[l] = numbers.below(8) + 1;
    fabric.bytes_per_s[l] = 1e9 * static_cast<double>(numbers.below(900) + 1) / 7.0;
    fabric.latency_s[l] = 1e-6 * static_cast<double>(numbers.below(100)) / 3.0;
    fabric.wrap[l] = static_cast<std::int32_t>(numbers.below(2));
  }
  return fabric;
}

std::uint64_t collective_bits() {
  Numbers numbers;
  Hash hash;
  for (int i = 0; i < 20000; ++i) {
    const FabricRecord fabric = random_fabric(numbers);
    std::int64_t held = 1;
    for (int l = 0; l < fabric.levels; ++l) held *= fabric.size[l];
    const std::int64_t ranks = numbers.below(held) + 1;
    const std::int64_t most = ranks > 1 ? (held - 1) / (ranks - 1) : 1;
    const std::int64_t stride = most > 0 ? numbers.below(most) + 1 : 1;
    const auto op = static_cast<CollectiveOp>(numbers.below(5));
    const double bytes = static_cast<double>(numbers.next()) / 13.0;
    const CollectiveResult result = collective(fabric, op, bytes, ranks, stride);
    CHECK(result.status == Status::kOk);
    hash.add(result.time_s);
    hash.add(static_cast<double>(result.algorithm));
    hash.add(collective_bound_s(fabric, op, bytes, ranks, stride));
  }
  return hash.value();
}

std::uint64_t silicon_bits() {
  Numbers numbers;
  Hash hash;
  const EnergyTable energy{0.59e-12, 0.845e-12, 1.0625e-12, 1.75e-12, 43.75e-12, 80e-12, 0.15};
  for (int i = 0; i < 20000; ++i) {
    ChipRecord chip{};
    chip.tensor_cores = numbers.below(4096) + 1;
    chip.tensor_width = numbers.below(256) + 1;
    chip.tensor_depth = numbers.below(256) + 1;
    chip.tensor_local_bytes = numbers.below(1 << 21);
    chip.vector_cores = numbers.below(4096) + 1;
    chip.vector_lanes = numbers.below(256) + 1;
    chip.vector_alus_per_lane = numbers.below(16) + 1;
    chip.vector_local_bytes = numbers.below(1 << 21);
    chip.buffer_bytes = numbers.below(1 << 28);
    chip.buffer_bytes_per_cycle = static_cast<double>(numbers.below(10000)) / 3.0;
    chip.buffer_port_bytes_per_cycle = static_cast<double>(numbers.below(600)) / 7.0;
    chip.hbm_bytes_per_s = 1e9 * static_cast<double>(numbers.below(8000));
    chip.hbm_stacks = numbers.below(8);
    chip.clock_hz = 1e6 * static_cast<double>(numbers.below(3000) + 1);
    const AreaBreakdown area = chip_area(chip, {0.0071876, 16.1898});
    hash.add(area.total_mm2);
    hash.add(peak_power_w(chip, energy, area.total_mm2));
  }
  return hash.value();
}

void same_everywhere(const char* what, std::uint64_t found, std::uint64_t expected) {
  if (found != expected) {
    std::printf("%s: 0x%016llxULL\n", what, static_cast<unsigned long long>(found));
  }
  CHECK(found == expected);
}

}  // namespace

int main() {
  same_everywhere("collective", collective_bits(), 0xee4737941f37d33eULL);
  same_everywhere("silicon", silicon_bits(), 0xbc44f72cd93bb629ULL);
  return phaze::test::report("bits");
}
