// One target under libFuzzer: compiled by clang with -fsanitize=fuzzer and PHAZE_FUZZ_TARGET set to
// its name. CI runs all targets over the stored inputs without clang (cpp/tests/test_fuzz.cpp).
#include "bytes.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  phaze::fuzz::PHAZE_FUZZ_TARGET({data, size});
  return 0;
}
