// Byte-exact meter of torch's CPU allocations, with a hard limit.
//
// Stands in front of the CPU allocator that was registered before it (posix_memalign'ed, 64 bytes, by default):
// that allocator provides the memory, this one counts. Sizes are kept apart from the memory, in a map keyed by
// address, because the caller must get the block itself (c10 asks that a raw allocation's context equals its data)
// and because the C library would only tell the rounded size.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

constexpr uint8_t kPriority = 100;
constexpr int64_t kNoLimit = -1;
constexpr size_t kNumShards = 64;

// Bytes requested for every block that is alive, split by address so that threads rarely wait for each other.
class SizeMap {
 public:
  void insert(const void* block, int64_t nbytes) {
    Shard& shard = shard_of(block);
    std::lock_guard<std::mutex> guard(shard.mutex);
    shard.nbytes_of[block] = nbytes;
  }

  int64_t remove(const void* block) {
    Shard& shard = shard_of(block);
    std::lock_guard<std::mutex> guard(shard.mutex);
    const auto found = shard.nbytes_of.find(block);
    if (found == shard.nbytes_of.end()) {
      return 0;
    }
    const int64_t nbytes = found->second;
    shard.nbytes_of.erase(found);
    return nbytes;
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<const void*, int64_t> nbytes_of;
  };

  Shard& shard_of(const void* block) {
    const auto address = reinterpret_cast<uintptr_t>(block);
    return shards_[((address >> 6) ^ (address >> 12)) % kNumShards];
  }

  std::array<Shard, kNumShards> shards_;
};

class MeteredAllocator final : public c10::Allocator {
 public:
  explicit MeteredAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t size) override {
    const auto nbytes = static_cast<int64_t>(size);
    charge(nbytes);
    void* block = nullptr;
    try {
      c10::DataPtr data = inner_->allocate(size);
      TORCH_CHECK(
          data.get() == data.get_context(),
          "the CPU allocator behind chunkc's meter hands out blocks with a header");
      block = data.get();
      sizes_.insert(block, nbytes);  // before the inner deleter is given up: if this throws, the block is freed
      data.release_context();
    } catch (...) {
      current_.fetch_sub(nbytes);
      throw;
    }
    return {block, block, &MeteredAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &MeteredAllocator::release;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    inner_->copy_data(dest, src, count);
  }

  int64_t current() const {
    return current_.load();
  }

  int64_t peak() const {
    return peak_.load();
  }

  void reset_peak() {
    peak_.store(current_.load());
  }

  // The peak since the last lap: a second counter, so that a caller's own peak is left alone.
  int64_t lap_peak() {
    return lap_peak_.exchange(current_.load());
  }

  int64_t limit() const {
    return limit_.load();
  }

  void set_limit(int64_t nbytes) {
    limit_.store(nbytes);
  }

 private:
  static void release(void* block);

  void charge(int64_t nbytes) {
    int64_t before = current_.load();
    do {
      const int64_t limit = limit_.load();
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          limit == kNoLimit || nbytes == 0 || before + nbytes <= limit,
          "CPU memory limit exceeded: requested ", nbytes, " bytes with ", before,
          " bytes in use and a limit of ", limit, " bytes");
    } while (!current_.compare_exchange_weak(before, before + nbytes));
    raise(peak_, before + nbytes);
    raise(lap_peak_, before + nbytes);
  }

  static void raise(std::atomic<int64_t>& peak, int64_t nbytes) {
    int64_t seen = peak.load();
    while (seen < nbytes && !peak.compare_exchange_weak(seen, nbytes)) {
    }
  }

  c10::Allocator* const inner_;
  SizeMap sizes_;
  std::atomic<int64_t> current_{0};
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> lap_peak_{0};
  std::atomic<int64_t> limit_{kNoLimit};
};

// Never destroyed: tensors may outlive every static destructor.
MeteredAllocator* meter = nullptr;

void MeteredAllocator::release(void* block) {
  if (block == nullptr) {
    return;
  }
  const int64_t nbytes = meter->sizes_.remove(block);  // before the block is freed and its address given out again
  meter->inner_->raw_deleter()(block);
  meter->current_.fetch_sub(nbytes);
}

}  // namespace

extern "C" {

// 1 when the meter is torch's CPU allocator afterwards, 0 when another one with a higher priority stays in front,
// and -1 when the allocator in place cannot be metered. Call under a lock.
int chunkc_meter_install() {
  c10::Allocator* const inner = c10::GetCPUAllocator();
  if (meter == nullptr) {
    if (inner->raw_deleter() == nullptr) {
      return -1;
    }
    meter = new MeteredAllocator(inner);
    c10::SetCPUAllocator(meter, kPriority);
  }
  return c10::GetCPUAllocator() == meter ? 1 : 0;
}

int64_t chunkc_meter_current() {
  return meter->current();
}

int64_t chunkc_meter_peak() {
  return meter->peak();
}

void chunkc_meter_reset_peak() {
  meter->reset_peak();
}

int64_t chunkc_meter_lap_peak() {
  return meter->lap_peak();
}

int64_t chunkc_meter_limit() {
  return meter->limit();
}

void chunkc_meter_set_limit(int64_t nbytes) {
  meter->set_limit(nbytes);
}
}
