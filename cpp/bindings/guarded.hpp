// Objects that change while the GIL is released: a concurrent call from a second thread is refused
// instead of reading data that is being written. Waiting would hide that two threads share one
// object and would let the order of their calls decide the answer.
#pragma once

#include <atomic>
#include <string>
#include <utility>

#include "arrays.hpp"

namespace phaze::bindings {

template <typename T>
class Guarded {
 public:
  // Exclusive access to the mutable state for the lifetime of the Turn. Convert Python arguments
  // first: Python may switch threads between two steps of Python code.
  class Turn {
   public:
    explicit Turn(Guarded& of) : of_(of) {
      if (of.busy_.test_and_set(std::memory_order_acquire)) {
        throw InUse(std::string(of.name_) +
                    " is in use by another thread; give each thread its own");
      }
    }
    ~Turn() { of_.busy_.clear(std::memory_order_release); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    T& operator*() const { return of_.object_; }
    T* operator->() const { return &of_.object_; }

   private:
    Guarded& of_;
  };

  // `name` has static storage.
  template <typename... Arguments>
  explicit Guarded(const char* name, Arguments&&... arguments)
      : name_(name), object_(std::forward<Arguments>(arguments)...) {}

  // Access to state that no call changes; any thread may read it at any time.
  const T& fixed() const { return object_; }

 private:
  const char* name_;
  std::atomic_flag busy_;
  T object_;
};

}  // namespace phaze::bindings
