#include "jit/ptx.h"

#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "jit/jit.h"
#include "jit/lowering.h"
#include "llvm/IR/CallingConv.h"
#include "llvm/IR/LLVMContext.h"
#include "llvm/IR/Module.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/Target/TargetOptions.h"

namespace quire {
namespace {

std::unique_ptr<llvm::TargetMachine> make_machine(const std::string& architecture) {
  static std::once_flag once;
  std::call_once(once, [] {
    LLVMInitializeNVPTXTargetInfo();
    LLVMInitializeNVPTXTarget();
    LLVMInitializeNVPTXTargetMC();
    LLVMInitializeNVPTXAsmPrinter();
  });
  const llvm::Triple triple("nvptx64-nvidia-cuda");
  std::string error;
  const llvm::Target* target = llvm::TargetRegistry::lookupTarget(triple, error);
  if (target == nullptr) throw std::runtime_error("LLVM has no target for GPUs: " + error);
  llvm::TargetOptions options;
  // Without this, the driver might join a multiplication and an addition, which rounds once instead of twice.
  options.AllowFPOpFusion = llvm::FPOpFusion::Strict;
  return std::unique_ptr<llvm::TargetMachine>(target->createTargetMachine(
      triple, architecture, "", options, std::nullopt, std::nullopt, llvm::CodeGenOptLevel::Aggressive));
}

}  // namespace

PtxCompiler::PtxCompiler(std::string architecture, std::filesystem::path cache_dir)
    : architecture_(std::move(architecture)), cache_(std::move(cache_dir)) {
  if (!make_machine("")->getMCSubtargetInfo()->isCPUStringValid(architecture_))
    throw std::invalid_argument("LLVM cannot generate code for the GPU architecture '" + architecture_ + "'");
}

std::string PtxCompiler::compile(const std::string& source) {
  return cache_.get({source, kPipeline, architecture_, llvm_version()}, ".ptx", [&] {
    llvm::LLVMContext context;
    const auto machine = make_machine(architecture_);
    const auto module = lower(source, *machine, context);
    for (llvm::Function& function : *module) {
      if (function.isDeclaration()) continue;
      if (function.getCallingConv() != llvm::CallingConv::PTX_Kernel) {
        function.setLinkage(llvm::GlobalValue::InternalLinkage);
        function.addFnAttr(llvm::Attribute::AlwaysInline);
      }
      function.addFnAttr("target-cpu", architecture_);
      function.addFnAttr("denormal-fp-math-f32", "preserve-sign,preserve-sign");
      function.addFnAttr(llvm::Attribute::NoUnwind);
      function.addFnAttr(llvm::Attribute::Convergent);  // threads wait for each other
    }
    optimise(*module, *machine);
    return print_assembly(*module, *machine);
  });
}

}  // namespace quire
