// Runs every fuzz target over its stored inputs, then over random bytes.
//
//     test_fuzz CORPUS [SECONDS [SEED]]
//
// CORPUS/TARGET/* are inputs selected by a coverage-guided run; SECONDS of random bytes follow (1
// by default), divided evenly among the targets. A failure aborts.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "../fuzz/bytes.hpp"
#include "check.hpp"
#include "numbers.hpp"

namespace {

using phaze::fuzz::Target;

long run_stored(const Target& target, const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  if (!std::filesystem::is_directory(folder / target.name)) return 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / target.name)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
    target.run({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
  }
  return static_cast<long>(files.size());
}

long run_random(const Target& target, double seconds, std::uint64_t seed) {
  const auto begin = std::chrono::steady_clock::now();
  phaze::test::Numbers numbers(seed);
  std::vector<std::uint8_t> bytes;
  long cases = 0;
  do {
    bytes.resize(static_cast<std::size_t>(numbers.below(400)));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(numbers.below(256));
    target.run({bytes.data(), bytes.size()});
    ++cases;
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() <
           seconds);
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::printf("usage: test_fuzz CORPUS [SECONDS [SEED]]\n");
    return 2;
  }
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  const std::uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  for (const Target& target : phaze::fuzz::kTargets) {
    const long stored = run_stored(target, argv[1]);
    CHECK(stored > 0);
    const auto share = seconds / static_cast<double>(std::size(phaze::fuzz::kTargets));
    std::printf("%-10s %ld stored inputs, %ld random ones\n", target.name, stored,
                run_random(target, share, seed));
  }
  return phaze::test::report("fuzz");
}
