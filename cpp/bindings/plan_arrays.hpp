// How times go into the plan kernel and plans come out of it, as NumPy sees them.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "arrays.hpp"
#include "phaze/plan.hpp"

namespace phaze::bindings {

// A plan that was found, as Python sees it: its cuts and variants are runs of one array.
struct PlacedRecord {
  double time_s;
  double memory_bytes;
  std::int64_t layout;  // -1 where there is none
  std::int64_t cuts_at;
  std::int64_t cuts;
  std::int64_t variants_at;
  std::int64_t variants;
};

// Times of `rows` (chips or strategies), read off an object with named arrays.
class TimesView {
 public:
  TimesView(const py::object& times, int kinds, const char* name) : kinds_(kinds) {
    hbm_ = view<double>(times.attr("hbm_bytes_per_s"), "hbm_bytes_per_s");
    rows_ = hbm_.size();
    const auto flat = [&](const char* field, py::ssize_t length) {
      const auto array = py::reinterpret_borrow<py::array>(times.attr(field));
      return view<double>(array.attr("reshape")(-1), field, length);
    };
    const auto one = static_cast<py::ssize_t>(rows_) * kinds;
    forward_ = flat("forward_s", one);
    plain_ = flat("plain_s", one);
    weight_grad_ = flat("weight_grad_s", one);
    forward_j_ = flat("forward_j", one);
    backward_ = flat("backward_s", -1);
    backward_j_ = flat("backward_j", static_cast<py::ssize_t>(backward_.size()));
    static_ = view<double>(times.attr("static_w"), "static_w", static_cast<py::ssize_t>(rows_));
    if (rows_ > 0) variants_ = backward_.size() / static_cast<std::size_t>(one);
    if (rows_ > 0 &&
        (variants_ < 1 || variants_ * static_cast<std::size_t>(one) != backward_.size())) {
      throw InvalidInput(std::string(name) + ".backward_s: expected rows x variants x kinds");
    }
  }

  std::size_t rows() const noexcept { return rows_; }
  std::size_t variants() const noexcept { return variants_; }

  KindTimes operator[](std::size_t row) const noexcept {
    const std::size_t one = row * static_cast<std::size_t>(kinds_);
    const std::size_t many = one * variants_;
    return {forward_.data() + one,
            plain_.data() + one,
            backward_.data() + many,
            weight_grad_.data() + one,
            forward_j_.data() + one,
            backward_j_.data() + many,
            hbm_[row],
            static_[row]};
  }

 private:
  int kinds_;
  std::size_t rows_ = 0;
  std::size_t variants_ = 0;
  std::span<const double> hbm_, forward_, plain_, backward_, weight_grad_, forward_j_, backward_j_,
      static_;
};

struct PlacedArrays {
  py::array_t<PlacedRecord> placed;
  py::array_t<std::int32_t> borders;  // cuts and variants of all plans
};

inline PlacedArrays placed_arrays(const std::vector<PlacedPlan>& plans) {
  py::array_t<PlacedRecord> records(static_cast<py::ssize_t>(plans.size()));
  std::vector<std::int32_t> pool;
  for (std::size_t k = 0; k < plans.size(); ++k) {
    const PlacedPlan& plan = plans[k];
    const bool there = plan.time_s < std::numeric_limits<double>::infinity();
    PlacedRecord& record = records.mutable_data()[k];
    const auto put = [&](const std::vector<std::int32_t>& values, std::int64_t* at,
                         std::int64_t* count) {
      *at = static_cast<std::int64_t>(pool.size());
      *count = static_cast<std::int64_t>(values.size());
      pool.insert(pool.end(), values.begin(), values.end());
    };
    record = {plan.time_s, plan.memory_bytes, there ? plan.layout : -1, 0, 0, 0, 0};
    if (!there) continue;
    put(plan.partition.cuts, &record.cuts_at, &record.cuts);
    put(plan.partition.variants, &record.variants_at, &record.variants);
  }
  return {freeze(std::move(records)), array(pool)};
}

// Asks a Python function whether to stop, with the GIL; nothing where it is None. The function has
// to outlive what is returned.
inline AskedToStop asked_to_stop(const py::object& stop) {
  if (stop.is_none()) return {};
  return [&stop] {
    const py::gil_scoped_acquire held;
    return stop().cast<bool>();
  };
}

// Pairs of positions that stand one after another in an array.
struct Pairs {
  explicit Pairs(std::span<const std::int32_t> flat) {
    for (std::size_t e = 0; e + 1 < flat.size(); e += 2) {
      from.push_back(flat[e]);
      to.push_back(flat[e + 1]);
    }
  }
  std::vector<std::int32_t> from, to;
};

}  // namespace phaze::bindings
