// The least memory that plans of a layout need.
#include "placement/plan_rooms.hpp"

namespace phaze {
namespace {

constexpr double kSure = 1.0 - 1e-9;

}  // namespace

// Every stage holds so many blocks at least where none may hold more than `most`, so the first and
// the last need that much, in the first variant that fits; and some stage holds an even share, with
// one micro-batch in flight or more.
double least_memory(const PlanSpaceImpl& space, const PlanRow& row, double room_bytes,
                    double most) {
  const RoomForBlocks room(space, row, room_bytes);
  const LayoutRecord& l = row.layout;
  const double least = std::max(0.0, space.blocks - (l.stages - 1) * most);
  const auto bytes = [&](int stage, bool first, bool last) {
    const double in_flight =
        micro_batches_in_flight(schedule_of(l), l.stages, stage, l.micro_batches, l.vpp);
    return room.least_bytes(least, most, in_flight, first, last);
  };
  if (l.stages == 1) return bytes(0, true, true) * kSure;
  const double in_flight =
      micro_batches_in_flight(schedule_of(l), l.stages, 0, l.micro_batches, l.vpp);
  return std::max({bytes(0, true, false), bytes(l.stages - 1, false, true),
                   room.even_bytes(row.bound.whole, most, in_flight)}) *
         kSure;
}

namespace {

bool all_held(const PlanSpaceImpl& space, const LayoutRecord& l, const RoomForBlocks& room,
              double bytes) {
  double held = 0.0;
  double in_flight = -1.0;
  double own = 0.0;
  for (int stage = l.stages - 1; stage >= 0; --stage) {
    const double now =
        micro_batches_in_flight(schedule_of(l), l.stages, stage, l.micro_batches, l.vpp);
    if (now != in_flight) own = room.blocks_within(bytes, now);
    in_flight = now;
    held += own;
    if (held >= space.blocks) return true;
  }
  return false;
}

}  // namespace

bool holds_all(const PlanSpaceImpl& space, const PlanRow& row, double room_bytes, double bytes) {
  return all_held(space, row.layout, RoomForBlocks(space, row, room_bytes), bytes * kRoomy);
}

// The least that all stages together must be allowed, each recomputing what it must, to hold every
// block.
double least_memory_of_all(const PlanSpaceImpl& space, const PlanRow& row, double room_bytes,
                           double low) {
  const RoomForBlocks room(space, row, room_bytes);
  double high = room_bytes;
  for (int step = 0; step < 8; ++step) {
    const double middle = 0.5 * (low + high);
    (all_held(space, row.layout, room, middle) ? high : low) = middle;
  }
  return low * kSure;
}

}  // namespace phaze
