// The native kernels with threads of this program's own, for check_native_kernels.py: reads inputs, writes results.
//
//   program DIRECTORY NUM_ATTENTION_CASES NUM_PRODUCTS NUM_DRAWS

#include <condition_variable>
#include <deque>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu_attention.cc"
#include "cpu_matmul.cc"
#include "cpu_sampling.cc"

namespace {

// As much of XLA's pool as the kernels use.
class Pool {
 public:
  Pool() {
    for (int i = 0; i < 4; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

  template <class Task>
  void Schedule(Task&& task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.emplace_back(std::forward<Task>(task));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

class Input {
 public:
  explicit Input(const std::string& path) : file_(path, std::ios::binary) {}

  // Exactly as long as it says, so that the sanitizer sees every step beyond.
  template <class T>
  std::vector<T> read(size_t count) {
    std::vector<T> numbers(count);
    file_.read(reinterpret_cast<char*>(numbers.data()), static_cast<std::streamsize>(count * sizeof(T)));
    return numbers;
  }

 private:
  std::ifstream file_;
};

template <class T>
void write(const std::string& path, const std::vector<T>& numbers) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(T)));
}

void check_attention(const std::string& path, Pool& pool) {
  using namespace jpaged::attention;
  Input input(path);
  const auto header = input.read<int64_t>(12);
  const auto factors = input.read<float>(2);
  const bool is_bf16 = header[0];
  const size_t size = is_bf16 ? 2 : 4;
  const int64_t tokens = header[1], q_row = header[3] * header[5], k_row = header[4] * header[5];
  auto q = input.read<char>(tokens * q_row * size), k = input.read<char>(tokens * k_row * size);
  auto v = input.read<char>(tokens * k_row * size), out = std::vector<char>(tokens * q_row * size, 1);
  const int64_t layers = header[9] + 1;
  auto pages = input.read<char>(layers * header[7] * header[6] * 2 * k_row * size);
  const int64_t padded = [&] {  // sequences: what is left holds 2 * S + 1 + S * pages_per_seq + Hq words
    std::ifstream whole(path, std::ios::binary | std::ios::ate);
    const int64_t fixed = 12 * 8 + 2 * 4 + static_cast<int64_t>(q.size() + k.size() + v.size() + pages.size());
    return ((static_cast<int64_t>(whole.tellg()) - fixed) / 4 - header[3] - 1) / (2 + header[8]);
  }();
  const auto cu_q_lens = input.read<int32_t>(padded + 1), kv_lens = input.read<int32_t>(padded);
  const auto page_table = input.read<int32_t>(padded * header[8]);
  const auto sinks = input.read<float>(header[3]);
  const Call call{
      .q = {q.data(), is_bf16},
      .k = {k.data(), is_bf16},
      .v = {v.data(), is_bf16},
      .out = {out.data(), is_bf16},
      .pages = reinterpret_cast<uint32_t*>(pages.data()),
      .cu_q_lens = cu_q_lens.data(),
      .kv_lens = kv_lens.data(),
      .page_table = page_table.data(),
      .sinks = header[11] ? sinks.data() : nullptr,
      .num_tokens = tokens,
      .num_seqs = header[2],
      .num_q_heads = header[3],
      .num_kv_heads = header[4],
      .head_dim = header[5],
      .group = header[3] / header[4],
      .page_size = header[6],
      .pages_per_layer = header[7],
      .pages_per_seq = header[8],
      .layer = header[9],
      .scale = factors[0],
      .soft_cap = factors[1],
      .window = header[10],
  };
  run(call, is_bf16, pool);
  write(path + ".result", out);
  write(path + ".result-pages", pages);
}

void check_product(const std::string& path, Pool& pool) {
  using namespace jpaged::matmul;
  Input input(path);
  const auto header = input.read<int64_t>(4);
  const auto x = input.read<float>(header[1] * header[3]);
  const auto [is_bf16, rows, outputs, inputs] = std::tuple(header[0] != 0, header[1], header[2], header[3]);
  const auto weights = input.read<char>(outputs * inputs * (is_bf16 ? 2 : 4));
  const auto packed = [&](int64_t outputs, int64_t inputs) {
    const int64_t words = is_bf16 ? (inputs + 31) / 32 * 16 : inputs;
    std::vector<uint32_t> words_of_blocks((outputs + 15) / 16 * words * 16);
    pack({weights.data(), words_of_blocks.data(), 1, outputs, inputs, words, is_bf16 ? 2 : 4}, pool);
    return std::pair(words_of_blocks, words);
  };
  std::vector<float> y(rows * outputs);
  const auto [data, words] = packed(outputs, inputs);
  const Weights layer{data.data(), outputs, words};
  const jpaged::matmul::Input plain{x.data(), rows, inputs, nullptr, 0};
  project(plain, layer, is_bf16, {y.data(), nullptr, outputs}, pool);
  write(path + ".result", y);
  // With a norm before and a residual after, whose values tests check.
  std::vector<float> added(rows * outputs);
  const jpaged::matmul::Input normed{x.data(), rows, inputs, x.data(), 1e-5f};
  project(normed, layer, is_bf16, {added.data(), y.data(), outputs}, pool);
  if (outputs % 32 != 0) return;
  // The same numbers once more: as gates and ups in turns, and their first half as what comes after.
  const auto [down_data, down_words] = packed(inputs, outputs / 2);
  std::vector<float> fed(rows * inputs);
  feed_forward(plain, {layer, 1, Activation::kSilu}, {down_data.data(), inputs, down_words}, is_bf16,
               {fed.data(), nullptr, inputs}, pool);
  write(path + ".result-fed", fed);
}

void check_draws(const std::string& path, Pool& pool) {
  using namespace jpaged::sampling;
  Input input(path);
  const auto header = input.read<int64_t>(6);
  const int64_t rows = header[0], vocabulary = header[1], length = header[2], num_blocked = header[3];
  const int64_t num_biases = header[4], num_best = header[5];
  const auto numbers = input.read<float>(DrawCall::kNumbers * rows);
  const auto words = input.read<int32_t>(DrawCall::kWords * rows);
  const auto logits = input.read<float>(rows * vocabulary);
  const auto history = input.read<int32_t>(rows * length), blocked = input.read<int32_t>(rows * num_blocked);
  const auto bias_ids = input.read<int32_t>(rows * num_biases);
  const auto bias_values = input.read<float>(rows * num_biases);
  const auto token_ids = input.read<int32_t>(rows);
  const auto temperatures = input.read<float>(rows);
  std::vector<int32_t> drawn(rows), described(rows * (2 + 2 * num_best));
  run(
      DrawCall{
          .logits = logits.data(),
          .numbers = numbers.data(),
          .bias_values = bias_values.data(),
          .words = words.data(),
          .history = history.data(),
          .blocked = blocked.data(),
          .bias_ids = bias_ids.data(),
          .drawn = drawn.data(),
          .rows = rows,
          .vocabulary = vocabulary,
          .max_length = length,
          .num_blocked = num_blocked,
          .num_biases = num_biases,
      },
      pool);
  run(DescribeCall{logits.data(), temperatures.data(), token_ids.data(), described.data(), rows, vocabulary, num_best},
      pool);
  write(path + ".result", drawn);
  write(path + ".result-descriptions", described);
}

}  // namespace

int main(int, char** arguments) {
  const std::string directory = arguments[1];
#if defined(JPAGED_TILES)
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 2;  // ask Linux for the tile registers
#endif
  Pool pool;
  for (int i = 0; i < std::stoi(arguments[2]); ++i) check_attention(directory + "/attention-" + std::to_string(i), pool);
  for (int i = 0; i < std::stoi(arguments[3]); ++i) check_product(directory + "/product-" + std::to_string(i), pool);
  for (int i = 0; i < std::stoi(arguments[4]); ++i) check_draws(directory + "/draws-" + std::to_string(i), pool);
}
