#pragma once

#include <memory>
#include <string>

namespace llvm {
class LLVMContext;
class Module;
class TargetMachine;
}  // namespace llvm

namespace quire {

/// The passes from MLIR (arith, math, scf, vector, func and llvm dialects) to its LLVM dialect.
extern const char* const kPipeline;

/// Returns the LLVM IR of MLIR text, for a machine. Throws std::runtime_error with MLIR's diagnostics.
std::unique_ptr<llvm::Module> lower(const std::string& source, const llvm::TargetMachine& machine,
                                    llvm::LLVMContext& context);

/// Runs LLVM's passes but for its vectorizers: kernels are vectorized already.
void optimise(llvm::Module& module, llvm::TargetMachine& machine);

/// Returns the assembly of LLVM IR, which it changes.
std::string print_assembly(llvm::Module& module, llvm::TargetMachine& machine);

}  // namespace quire
