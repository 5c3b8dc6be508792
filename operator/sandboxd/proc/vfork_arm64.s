#include "textflag.h"

// func rawVfork(flags, pid uintptr) (id, errno uintptr)
// The child runs on the same stack first; the return address is in a register.
TEXT ·rawVfork(SB),NOSPLIT,$0-32
	MOVD	flags+0(FP), R0
	MOVD	$0, R1
	MOVD	pid+8(FP), R2
	MOVD	$0, R3
	MOVD	$0, R4
	MOVD	$0, R5
	MOVD	$220, R8 // clone
	SVC
	CMN	$4095, R0
	BCC	done
	MOVD	ZR, id+16(FP)
	NEG	R0, R0
	MOVD	R0, errno+24(FP)
	RET
done:
	MOVD	R0, id+16(FP)
	MOVD	ZR, errno+24(FP)
	RET
