// The layers of a strategy on chips, as a Python object.
#pragma once

#include <vector>

#include "arrays.hpp"
#include "interrupt.hpp"
#include "phaze/layers_on_chips.hpp"
#include "phaze/parallel.hpp"

namespace phaze::bindings {

inline void raise_for_layers(Status status) {
  if (status != Status::kOk) throw InvalidInput(std::string("layers: ") + sentence(status));
}

// Calls one(k, chips[k]) for every k; throws for the first status that is not kOk. The GIL need not
// be held.
template <typename One>
void each_chip(std::span<const std::int64_t> chips, int threads, const One& one) {
  std::vector<Status> statuses(chips.size(), Status::kOk);
  parallel_for(chips.size(), threads, 16, [&](std::size_t begin, std::size_t end) {
    for (std::size_t k = begin; k < end; ++k) {
      statuses[k] = one(k, static_cast<std::size_t>(chips[k]));
    }
  });
  for (const Status status : statuses) raise_for_layers(status);
}

// Rows of times as a dictionary of arrays, by the names of the fields of KindTimes in Python;
// variants that a row lacks are zero.
py::dict times_arrays(std::vector<TimesRow>& rows, int kinds, int variants);

class PyLayersOnChips {
 public:
  // Objects with arrays named as the fields of LayerGraphs and LayerCosts, which it refers to.
  PyLayersOnChips(const py::object& graphs, const py::object& costs);

  const LayersOnChips& core() const noexcept { return core_; }

  py::dict map(const py::object& chips, int threads) const;
  py::dict bound(const py::object& chips, int threads) const;
  py::dict time(const py::object& chips, const py::object& makespan_s) const;
  py::tuple roots(std::size_t chip, int threads) const;
  py::tuple schedule(const py::object& chips, std::int64_t max_nodes, int threads) const;

  std::span<const std::int64_t> checked(const py::object& chips) const;
  void check(std::size_t chip) const;
  std::vector<TimesRow> rows(std::size_t count) const {
    return std::vector<TimesRow>(count, TimesRow(core_.kinds(), core_.variants()));
  }

 private:
  py::object graphs_, costs_;  // keep the arrays alive
  LayersOnChips core_;
};

}  // namespace phaze::bindings
