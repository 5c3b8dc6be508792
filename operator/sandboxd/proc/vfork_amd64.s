#include "textflag.h"

// func rawVfork(flags, pid uintptr) (id, errno uintptr)
// The child runs on the same stack first: the return address must not lie on it.
TEXT ·rawVfork(SB),NOSPLIT|NOFRAME,$0-32
	MOVQ	flags+0(FP), DI
	MOVQ	$0, SI
	MOVQ	pid+8(FP), DX
	MOVQ	$0, R10
	MOVQ	$0, R8
	MOVQ	$0, R9
	MOVQ	$56, AX // clone
	POPQ	R12
	SYSCALL
	PUSHQ	R12
	CMPQ	AX, $0xfffffffffffff001
	JLS	done
	MOVQ	$0, id+16(FP)
	NEGQ	AX
	MOVQ	AX, errno+24(FP)
	RET
done:
	MOVQ	AX, id+16(FP)
	MOVQ	$0, errno+24(FP)
	RET
