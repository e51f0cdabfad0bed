// The number of the chosen mutant (PHAZE_MUTANT; 0 is none), and what was reached, written to the
// file PHAZE_REACHED at the end of the program.
#include "phaze/mutant.hpp"

#include <cstdio>
#include <cstdlib>

int phaze_mutant = 0;
unsigned char phaze_reached[4096] = {};

namespace {

struct AtBothEnds {
  AtBothEnds() {
    const char* chosen = std::getenv("PHAZE_MUTANT");
    if (chosen != nullptr) phaze_mutant = std::atoi(chosen);
  }
  ~AtBothEnds() {
    const char* name = std::getenv("PHAZE_REACHED");
    std::FILE* file = name != nullptr ? std::fopen(name, "wb") : nullptr;
    if (file == nullptr) return;
    std::fwrite(phaze_reached, 1, sizeof phaze_reached, file);
    std::fclose(file);
  }
} both_ends;

}  // namespace
