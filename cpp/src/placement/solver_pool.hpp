// Solvers that keep what they have learnt of a space from one call to the next. Private to the
// kernel.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "placement/plan_solver.hpp"

namespace phaze {

// Safe to use from several threads: a solver is lent to one at a time. What a solver has learnt
// saves time and changes no answer.
class SolverPool {
 public:
  class Lease {
   public:
    Lease(SolverPool* pool, std::unique_ptr<PlanSolver> solver) noexcept
        : pool_(pool), solver_(std::move(solver)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { pool_->give_back(std::move(solver_)); }

    PlanSolver* get() const noexcept { return solver_.get(); }

   private:
    SolverPool* pool_;
    std::unique_ptr<PlanSolver> solver_;
  };

  // A solver that looks steps up in `played` as long as it is lent.
  Lease lend(PlayedSteps* played) {
    std::unique_ptr<PlanSolver> solver;
    {
      const std::scoped_lock lock(mutex_);
      if (!idle_.empty()) {
        solver = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (solver == nullptr) solver = std::make_unique<PlanSolver>();
    solver->look_up(played);
    solver->forget();
    return {this, std::move(solver)};
  }

 private:
  void give_back(std::unique_ptr<PlanSolver> solver) noexcept {
    solver->look_up(nullptr);
    const std::scoped_lock lock(mutex_);
    try {
      idle_.push_back(std::move(solver));
    } catch (...) {  // without memory for the list, what was learnt is let go
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<PlanSolver>> idle_;
};

}  // namespace phaze
