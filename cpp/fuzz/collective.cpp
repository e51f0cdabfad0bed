#include "phaze/collective.hpp"

#include <cmath>

#include "bytes.hpp"
#include "phaze/types.hpp"

namespace phaze::fuzz {
namespace {

FabricRecord fabric_of(Bytes& bytes) {
  FabricRecord fabric{};
  fabric.kind = bytes.below(3);
  fabric.levels = 1 + bytes.below(3);
  for (int i = 0; i < fabric.levels; ++i) {
    fabric.size[i] = 1 + bytes.below(9);
    fabric.bytes_per_s[i] = 1e9 * (1 + bytes.below(100));
    fabric.latency_s[i] = 1e-6 * bytes.below(10);
    fabric.wrap[i] = bytes.below(2);
    fabric.full_mesh[i] = bytes.below(4) == 1 ? 1 : 0;
  }
  for (int changes = bytes.below(4); changes > 0; --changes) {
    const int at = bytes.below(kMaxLevels);
    switch (bytes.below(9)) {
      case 0:
        fabric.kind = bytes.awkward_int();
        break;
      case 1:
        fabric.levels = bytes.awkward_int();
        break;
      case 2:
        fabric.devices = bytes.awkward_integer();
        break;
      case 3:
        fabric.size[at] = bytes.awkward_integer();
        break;
      case 4:
        fabric.bytes_per_s[at] = bytes.awkward();
        break;
      case 5:
        fabric.latency_s[at] = bytes.awkward();
        break;
      case 6:
        fabric.in_switch_startup_s[at] = bytes.number(1e-6);
        fabric.in_switch_share[at] = bytes.number(0.05);
        break;
      case 7: {
        const int transfer = bytes.below(kTransfers);
        fabric.protocols[transfer] = 1 + bytes.below(kMaxProtocols);
        for (ProtocolRecord& way : fabric.protocol[transfer]) {
          way.most_bytes = bytes.number(1e5);
          for (int level = 0; level < kMaxLevels; ++level) {
            way.startup_s[level] = bytes.number(1e-6);
            way.step_s[level] = bytes.number(1e-6);
            way.share[level] = 0.1 + bytes.number(0.05);
            way.copy_s_per_byte[level] = bytes.number(1e-12);
          }
        }
        break;
      }
      default:
        fabric.protocols[at % kTransfers] = bytes.awkward_int();
    }
  }
  return fabric;
}

}  // namespace

void collective(Bytes bytes) {
  const FabricRecord fabric = fabric_of(bytes);
  const GroupShape shape{bytes.rarely(4) ? bytes.awkward_integer() : 1 + bytes.below(9),
                         1 + bytes.below(4),
                         bytes.rarely(4) ? bytes.awkward_integer() : 1 + bytes.below(3),
                         bytes.rarely(4) ? bytes.awkward_integer() : bytes.below(40)};
  const auto op = static_cast<CollectiveOp>(bytes.below(kCollectiveOpCount));
  const double sent = bytes.rarely(4) ? bytes.awkward() : 1e6 * bytes.below(1000);
  const CollectiveResult found = phaze::collective(fabric, op, sent, shape);
  REQUIRE(found.status == Status::kOk ? found.time_s >= 0.0 : std::isnan(found.time_s));
  for (int each = 0; each < kAlgorithmCount; ++each) {
    const CollectiveResult one =
        collective_with(fabric, op, sent, shape, static_cast<Algorithm>(each));
    REQUIRE(one.status == Status::kOk ? one.time_s >= 0.0 : std::isnan(one.time_s));
  }
  const CollectiveResult pair = message(fabric, sent, bytes.integer(70), bytes.integer(70));
  REQUIRE(pair.status == Status::kOk ? pair.time_s >= 0.0 : std::isnan(pair.time_s));
}

}  // namespace phaze::fuzz
