#include <cmath>

#include "check.hpp"
#include "phaze/fusion.hpp"

namespace {

using namespace phaze;

constexpr BufferRules kExact{2.0, 2.0, 1.0};
constexpr double kMiB = 1048576.0;

FusedGroup chain(std::int64_t rows, std::int64_t inner, std::int64_t hidden, std::int64_t outer) {
  return {1, rows, 1, inner, hidden, 1, outer, 1.0, 1.0, 1.0, 1.0, 0.0};
}

// Figures of an exact mapper; tests/golden/fusion_reference.csv has more.
void figures_of_an_exact_mapper() {
  const FusedGroup bert = chain(2048, 1024, 4096, 1024);
  CHECK(least_group_traffic(bert, kMiB, kExact).hbm_bytes == 116.0 * kMiB);
  const FusedTraffic whole = least_group_traffic(bert, 16.0 * kMiB, kExact);
  CHECK(whole.hbm_bytes == 24.0 * kMiB);
  CHECK(whole.row_passes == 1);
  CHECK(least_product_bytes(2048, 1024, 4096, kMiB, kExact) == 60.0 * kMiB);
}

void nothing_fits_and_steps() {
  CHECK(std::isinf(least_group_traffic(chain(4, 4, 4, 4), 5.0, kExact).hbm_bytes));
  CHECK(std::isinf(least_product_bytes(4, 4, 4, 5.0, kExact)));
  FusedGroup group = chain(8, 4, 8, 4);
  const double free = least_group_traffic(group, 200.0, kExact).hbm_bytes;
  group.row_step = 8;
  CHECK(least_group_traffic(group, 200.0, kExact).hbm_bytes >= free);
  group.count = 3;
  group.moved = 7.0;
  const double one = least_group_traffic(chain(8, 4, 8, 4), 1e6, kExact).hbm_bytes;
  CHECK(least_group_traffic(group, 1e6, kExact).hbm_bytes == 3.0 * (one + 7.0));
}

void what_is_valid() {
  CHECK(is_valid(chain(1, 1, 1, 1), kExact));
  CHECK(is_valid(chain(1, 0, 1, 1), kExact));
  CHECK(!is_valid(chain(1, 0, 1, 0), kExact));
  CHECK(!is_valid(chain(0, 1, 1, 1), kExact));
  CHECK(!is_valid(chain(1, 1, 1, 1), {2.0, std::nan(""), 1.0}));
}

}  // namespace

int main() {
  figures_of_an_exact_mapper();
  nothing_fits_and_steps();
  what_is_valid();
  return phaze::test::report("fusion");
}
