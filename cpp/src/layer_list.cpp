#include <algorithm>
#include <limits>

#include "layer_facts.hpp"

namespace phaze {
namespace {

// How a list schedule picks the way to run an operator.
enum class ModeChoice {
  kFastest,
  kNarrowest,
  kShared,  // the fastest, if the ready operators one after another take no longer than this one
            // in its narrowest mode
};

int wanted_mode(const LayerFacts& facts, ModeChoice choice, int op, int ready) noexcept {
  const int fastest = facts.useful(op, 0);
  const int narrowest = facts.useful(op, facts.useful_count(op) - 1);
  if (choice == ModeChoice::kFastest) return fastest;
  if (choice == ModeChoice::kNarrowest) return narrowest;
  const LayerMode* modes = facts.problem().modes;
  const bool fast = modes[fastest].seconds * ready <= modes[narrowest].seconds;
  return fast ? fastest : narrowest;
}

LayerSolution list_with(const LayerFacts& facts, ModeChoice choice) noexcept {
  LayerSolution made;
  made.nodes = 0;
  made.proved_by = ProvedBy::kNothing;
  Moment moment = facts.beginning();
  while (moment.done != facts.all()) {
    std::int32_t ready[kMaxLayerOps];
    int count = 0;
    for_ops(facts.all() & ~moment.started, [&](int op) {
      if (!facts.may_start(moment, op)) return;
      int at = count++;  // longest tail first
      for (; at > 0 && facts.tail_s(ready[at - 1]) < facts.tail_s(op); --at) {
        ready[at] = ready[at - 1];
      }
      ready[at] = op;
    });
    for (int i = 0; i < count; ++i) {
      const int op = ready[i];
      const int mode = wanted_mode(facts, choice, op, count);
      if (!facts.fits(moment, mode)) continue;
      made.start_s[op] = moment.now_s;
      made.mode[op] = mode - facts.problem().first_mode[op];
      facts.start(&moment, op, mode);
    }
    facts.advance(&moment);
  }
  made.makespan_s = moment.now_s;
  return made;
}

}  // namespace

LayerSolution best_list_schedule(const LayerFacts& facts) noexcept {
  LayerSolution best = list_with(facts, ModeChoice::kFastest);
  for (const ModeChoice choice : {ModeChoice::kNarrowest, ModeChoice::kShared}) {
    const LayerSolution made = list_with(facts, choice);
    if (made.makespan_s < best.makespan_s) best = made;
  }
  return best;
}

LayerSolution list_schedule(const LayerProblem& problem) noexcept {
  const LayerFacts facts(problem);
  LayerSolution best = best_list_schedule(facts);
  best.bound_s = facts.bound(facts.beginning(), 0) * kRoundedDown;
  return best;
}

}  // namespace phaze
