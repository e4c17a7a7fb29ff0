#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace standin {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
// Every float format reads these bytes as NaN, so that memory nobody has written shows in the result.
constexpr int kPoison = 0xFF;

struct Block {
  int64_t bytes;
  int device, owner;
};

std::mutex mutex;
std::array<Account, kDevices> accounts;
std::map<void*, Block> blocks;
std::map<const char*, size_t> pinned;
std::atomic<int> owner{0};
int count = 1;
thread_local int current = 0;

void* aligned(size_t bytes) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, 64, bytes) == 0, "the machine has no ", bytes, " bytes for the stand-in device");
  return pointer;
}

void free_block(void* pointer) {
  if (!pointer) return;
  std::unique_lock<std::mutex> lock(mutex);
  const auto found = blocks.find(pointer);
  lock.unlock();
  before_free(pointer, found->second.bytes);
  lock.lock();
  auto& own = accounts[found->second.device];
  own.live -= found->second.bytes;
  own.by_owner[found->second.owner] -= found->second.bytes;
  std::memset(pointer, kPoison, found->second.bytes);
  blocks.erase(found);
  std::free(pointer);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current;
    if (!bytes) return {nullptr, nullptr, &free_block, c10::Device(kDevice, device)};
    std::lock_guard<std::mutex> lock(mutex);
    auto& own = accounts[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, own.live + (int64_t)bytes <= own.cap, "NPU out of memory. Tried to allocate ", bytes,
        " bytes (NPU ", device, "; ", own.cap, " bytes total capacity; ", own.live, " bytes already allocated; ",
        own.cap - own.live, " bytes free)");
    void* pointer = aligned(bytes);
    std::memset(pointer, kPoison, bytes);
    blocks[pointer] = {(int64_t)bytes, device, owner};
    own.live += bytes;
    own.by_owner[owner] += bytes;
    own.allocations += 1;
    own.reserved = std::max(own.reserved, own.live);
    own.reserved_peak = std::max(own.reserved_peak, own.reserved);
    if (own.live > own.peak) {
      own.peak = own.live;
      own.by_owner_at_peak = own.by_owner;
    }
    return {pointer, pointer, &free_block, c10::Device(kDevice, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

void free_pinned(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(static_cast<const char*>(pointer));
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? aligned(bytes) : nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    if (pointer) pinned[static_cast<const char*>(pointer)] = bytes;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

}  // namespace

REGISTER_ALLOCATOR(kDevice, &the_device_allocator);

Account account(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return accounts.at(device);
}

void change_account(int device, void (*change)(Account&, int64_t), int64_t value) {
  std::lock_guard<std::mutex> lock(mutex);
  change(accounts.at(device), value);
}

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* byte = static_cast<const char*>(pointer);
  auto after = pinned.upper_bound(byte);
  return after != pinned.begin() && byte < std::prev(after)->first + std::prev(after)->second;
}

int current_device() { return current; }
int device_count() { return count; }
void set_device_count(int value) { count = std::min(value, kDevices); }

int exchange_device(int device) {
  TORCH_CHECK(device < count, "invalid device ordinal: NPU ", device, " of ", count);
  return device < 0 ? current : std::exchange(current, device);
}

int exchange_owner(int value) {
  TORCH_CHECK(0 <= value && value < kOwners, "an owner is a number below ", kOwners);
  return owner.exchange(value);
}

}  // namespace standin
